"""Flags of an encoder with a decoder."""

import pytest
from problems import problem
from tiny import tiny_plan

STAGES = ("--pipeline-model-parallel-size", "4", "--num-layers", "4")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--decoder-num-layers", "0"), "--decoder-num-layers 0 … 1"),
        (("--max-position-embeddings", "7"), "embeddings 7 … --decoder-seq-length 8"),
        (("--position-embedding-type", "alibi"), "alibi … not built"),
        (("--window-size", "2"), "--window-size … not built"),
        (("--num-experts", "2"), "--num-experts … not built"),
        (("--lora-rank", "2"), "--lora-rank … not built"),
        (("--pipeline-model-parallel-split-rank", "1"), "--pipeline-model-parallel-size"),
        ((*STAGES, "--pipeline-model-parallel-split-rank", "4"), "split-rank 4 … 1 to 3"),
        (
            (*STAGES, "--pipeline-model-parallel-split-rank", "1", "--decoder-num-layers", "4"),
            "--decoder-num-layers 4 … 3 stages",
        ),
        (
            (
                *("--position-embedding-type", "relative"),
                *("--relative-attention-num-buckets", "6"),
            ),
            "--relative-attention-num-buckets 6 … multiple of 4",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_a_wrong_flag_is_refused(flags, words):
    with problem(words):
        tiny_plan("--decoder-seq-length", "8", *flags, objective="t5", world_size=4)


def test_a_decoder_needs_a_length():
    with problem("--decoder-seq-length … missing"):
        tiny_plan(objective="t5")


def test_flags_of_two_stacks_are_refused_for_one():
    with problem("--decoder-num-layers … pretrain_t5.py"):
        tiny_plan("--decoder-num-layers", "2")
    with problem("relative … pretrain_t5.py"):
        tiny_plan("--position-embedding-type", "relative")


def test_the_spelling_of_the_encoder_is_that_of_the_network():
    plan = tiny_plan(
        *("--encoder-num-layers", "3", "--decoder-seq-length", "4"),
        without=("--num-layers",),
        objective="t5",
    )
    assert (plan.model.num_layers, plan.model.own.num_decoder_layers) == (3, 3)
