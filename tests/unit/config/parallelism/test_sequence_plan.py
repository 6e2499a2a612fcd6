"""Layouts in which the sequence is divided."""

import pytest
from tiny import tiny_plan

from megatron.common.errors import ConfigError

TENSOR = "--tensor-model-parallel-size 2"


def plan_of(line, world_size):
    return tiny_plan(*line.split(), world_size=world_size)


def test_sequence_parallelism_needs_somebody_to_divide_with():
    alone = plan_of("--sequence-parallel", 1)
    assert not alone.parallel.sequence_parallel
    assert any("--sequence-parallel has no effect" in notice for notice in alone.notices)
    assert plan_of(f"{TENSOR} --sequence-parallel", 2).parallel.sequence_parallel


def test_stages_send_parts_as_they_are():
    line = f"{TENSOR} --pipeline-model-parallel-size 2"
    assert "pipeline" not in plan_of(line, 4).deepspeed
    pipeline = plan_of(f"{line} --sequence-parallel", 4).deepspeed["pipeline"]
    assert pipeline == {"pipe_partitioned": False, "grad_partitioned": False}


def test_ranks_that_share_samples_are_no_replicas():
    decided = plan_of("--ds-sequence-parallel-size 2 --global-batch-size 8", 4)
    assert (decided.parallel.sequence, decided.parallel.data) == (2, 2)
    assert decided.parallel.world_size == 4
    assert decided.deepspeed["gradient_accumulation_steps"] == 2


@pytest.mark.parametrize(
    ("line", "world_size", "output"),
    [
        (f"{TENSOR} --sequence-parallel --seq-length 5", 2, "--seq-length 5 is not a multiple of"),
        ("--ds-sequence-parallel-size 4", 4, "2: --seq-length 6|4: --seq-length 6 is not a mult"),
        (f"{TENSOR} --ds-sequence-parallel-size 2", 4, "heads 2 is not a multiple of 4"),
        (
            "--num-attention-heads 4 --group-query-attention --num-query-groups 1 "
            "--ds-sequence-parallel-size 2",
            2,
            "--num-query-groups 1 is not a multiple of 2",
        ),
        (
            f"{TENSOR} --num-attention-heads 4 --sequence-parallel --ds-sequence-parallel-size 2",
            4,
            "both divide the sequence",
        ),
        (
            "--pipeline-model-parallel-size 2 --ds-sequence-parallel-size 2",
            4,
            "write one pipeline stage",
        ),
        ("--ds-sequence-parallel-size 2", 3, "3 processes cannot hold full replicas of 2"),
        ("--ds-sequence-parallel-size 0", 1, "must be at least 1"),
        ("--context-parallel-size 2", 1, "write --ds-sequence-parallel-size"),
    ],
)
def test_layouts_that_do_not_fit_are_told(line, world_size, output):
    with pytest.raises(ConfigError, match=output):
        plan_of(line, world_size)
