"""The helper itself: what goes wrong on any rank is not overlooked."""

import time

import pytest
import torch.distributed as dist
from ranks import PASSED, outcomes_on_ranks, run_on_ranks


def holds(rank):
    assert dist.get_world_size() == 2


def fails_on_rank_1(rank):
    assert rank == 0, "only rank 0 is right"


def comes_too_late(rank):
    raise AssertionError("never reached")


def hangs(rank):
    if rank == 1:
        time.sleep(60)


def test_a_failure_of_any_rank_is_told_and_what_follows_has_not_run(tmp_path):
    outcomes = outcomes_on_ranks(2, [holds, fails_on_rank_1, comes_too_late], tmp_path)
    assert outcomes["holds"] == PASSED
    assert "[rank 1] Traceback" in outcomes["fails_on_rank_1"]
    assert "only rank 0 is right" in outcomes["fails_on_rank_1"]
    assert "did not finish" in outcomes["comes_too_late"]


def test_a_hang_is_a_failure(tmp_path):
    with pytest.raises(TimeoutError, match="hangs did not end within"):
        run_on_ranks(2, hangs, tmp_path, timeout_s=3)
