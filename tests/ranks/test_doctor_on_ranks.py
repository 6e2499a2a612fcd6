"""What the doctor measures between ranks."""

import time

import pytest
import torch
import torch.distributed as dist
from ranks import outcomes_on_ranks, require_passed

from megatron.diagnostics.doctor import network
from megatron.training.process.environment import Launch

CPU = torch.device("cpu")


def clocks_that_disagree_are_found(rank):
    section = network.clock_section([1], clock=lambda: time.time() + 100 * rank)
    if rank == 0:
        assert 99_000 < float(section.facts["rank 1"].split()[0]) < 101_000
        (problem,) = section.problems
        assert "clock of rank 1 is +100.0 s" in problem.what
    else:
        assert section == network.Section("clocks", {})


def clocks_that_agree_are_none(rank):
    assert network.clock_section([1]).problems == ()


def sums_are_measured_and_right(rank):
    section = network.network_section(Launch(rank, 2, rank, 2), CPU)
    assert section.problems == ()
    assert "gloo all-reduce of 64 MiB" in section.facts


def wrong_sums_are_found(rank):
    def off_by_one(numbers, **words):
        all_reduce(numbers, **words)
        numbers[-1] += 1

    all_reduce = dist.all_reduce
    try:
        dist.all_reduce = off_by_one
        _, is_right = network.time_all_reduce(4096, 1, group=dist.group.WORLD, device=CPU)
    finally:
        dist.all_reduce = all_reduce
    assert not is_right


def a_failure_is_found(rank):
    def fail(*words, **more):
        raise RuntimeError("NCCL error\nLast error: no route")

    measure = network.time_all_reduce
    try:
        network.time_all_reduce = fail
        (problem,) = network.network_section(Launch(rank, 2, rank, 2), CPU).problems
    finally:
        network.time_all_reduce = measure
    assert problem.what == "the gloo all-reduce of 4 KiB fails: Last error: no route"


CHECKS = (
    clocks_that_disagree_are_found,
    clocks_that_agree_are_none,
    sums_are_measured_and_right,
    wrong_sums_are_found,
    a_failure_is_found,
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(2, CHECKS, tmp_path_factory.mktemp("doctor"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_ranks(check, outcomes):
    require_passed(check, outcomes)
