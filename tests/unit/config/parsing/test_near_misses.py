"""Unknown flags are answered with the flag that is meant, or with none."""

import pytest

from megatron.config.parsing.near_misses import answer_for, distance

KNOWN = (
    *("lr", "lora-rank", "num-layers", "num-key-value-heads", "rope-scaling-factor", "async-save"),
    *("no-cross-entropy-fusion", "no-rope-fusion", "hidden-size", "micro-batch-size", "adam-beta2"),
    *("tensor-size", "load", "log-level", "fp16", "deepspeed_config"),
)
ANSWERS = {"batch-size": "write --micro-batch-size instead", "steps": "write --train-iters"}


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("hiden-size", "did you mean --hidden-size?"),
        ("num-layer", "did you mean --num-layers?"),
        ("layers-num", "did you mean --num-layers?"),
        ("microbatch-size", "did you mean --micro-batch-size?"),
        ("micro-batch", "did you mean --micro-batch-size?"),
        ("lrr", "did you mean --lr?"),
        ("optimizer.lr", "write --lr"),
        ("train.steps", "write --train-iters"),
        ("BATCH_SIZE", "write --micro-batch-size instead"),
        ("batch-sizes", "write --micro-batch-size instead"),
        ("rope-fusion", "it is on unless --no-rope-fusion is given"),
    ],
)
def test_a_misspelled_or_foreign_name_gets_its_answer(name, answer):
    assert answer_for(name, ANSWERS, KNOWN) == answer


@pytest.mark.parametrize(
    "name",
    [
        *("q-lora-rank", "kv-lora-rank", "num-layers-teacher", "load-teacher", "logging-level"),
        *("linear-num-value-heads", "rotary-scaling-factor", "mtp-loss-scaling-factor"),
        *("cross-entropy-loss-fusion", "async-strategy", "adam-beta3", "fp15", "sensor-size-2"),
        "num-query-value-heads",
    ],
)
def test_a_flag_of_another_meaning_is_not_offered(name):
    assert answer_for(name, ANSWERS, KNOWN) == ""


def test_distance_counts_swapped_letters_once():
    assert [distance("nmae", "name"), distance("a", "abc"), distance("", "ab")] == [1, 2, 2]
