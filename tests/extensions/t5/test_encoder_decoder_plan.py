"""Flags of an encoder with a decoder."""

import pytest
from tiny import tiny_plan

from megatron.common.errors import ConfigError

STAGES = ("--pipeline-model-parallel-size", "4", "--num-layers", "4")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--decoder-num-layers", "0"), "--decoder-num-layers 0 must be at least 1"),
        (("--max-position-embeddings", "7"), "less than --decoder-seq-length 8"),
        (("--position-embedding-type", "alibi"), "alibi is not built for"),
        (("--window-size", "2"), "--window-size is not built for"),
        (("--num-experts", "2"), "--num-experts is not built for"),
        (("--lora-rank", "2"), "--lora-rank is not built for"),
        (("--pipeline-model-parallel-split-rank", "1"), "needs --pipeline-model-parallel-size"),
        ((*STAGES, "--pipeline-model-parallel-split-rank", "4"), "must be from 1 to 3"),
        (
            (*STAGES, "--pipeline-model-parallel-split-rank", "1", "--decoder-num-layers", "4"),
            "--decoder-num-layers 4 is not a multiple of its 3 stages",
        ),
        (
            (
                *("--position-embedding-type", "relative"),
                *("--relative-attention-num-buckets", "6"),
            ),
            "6 must be a multiple of 4",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_a_wrong_flag_is_refused(flags, words):
    with pytest.raises(ConfigError, match=words):
        tiny_plan("--decoder-seq-length", "8", *flags, objective="t5", world_size=4)


def test_a_decoder_needs_a_length():
    with pytest.raises(ConfigError, match="--decoder-seq-length is missing"):
        tiny_plan(objective="t5")


def test_flags_of_two_stacks_are_refused_for_one():
    with pytest.raises(ConfigError, match="--decoder-num-layers is for pretrain_t5.py"):
        tiny_plan("--decoder-num-layers", "2")
    with pytest.raises(ConfigError, match="relative is for pretrain_t5.py"):
        tiny_plan("--position-embedding-type", "relative")


def test_the_spelling_of_the_encoder_is_that_of_the_network():
    plan = tiny_plan(
        *("--encoder-num-layers", "3", "--decoder-seq-length", "4"),
        without=("--num-layers",),
        objective="t5",
    )
    assert (plan.model.num_layers, plan.model.own.num_decoder_layers) == (3, 3)
