"""A run that cannot fit is announced at its start."""

import pytest
import torch
from problems import require_problem
from tiny import tiny_plan

from megatron.planner.memory import memory_of_stages
from megatron.training.telemetry.forecast import memory_warning

CPU = torch.device("cpu")


def test_a_batch_that_cannot_fit_names_what_it_needs_and_what_there_is(free_memory):
    free_memory(24 * 2**30)
    flags = ("--micro-batch-size", "10000000", "--global-batch-size", "10000000")
    plan = tiny_plan(*flags)
    needed = memory_of_stages(plan, device="cpu")[0].total / 2**30
    warning = memory_warning(plan, CPU, processes=1)
    require_problem(f"{needed:.1f} GiB … 24.0 GiB … --micro-batch-size", [warning])


@pytest.mark.parametrize(("processes", "warns"), [(1, False), (3, True)])
def test_the_processes_of_a_machine_share_its_memory(free_memory, processes, warns):
    plan = tiny_plan()
    needed = memory_of_stages(plan, device="cpu")[0].total
    free_memory(2 * needed)
    assert bool(memory_warning(plan, CPU, processes=processes)) is warns
