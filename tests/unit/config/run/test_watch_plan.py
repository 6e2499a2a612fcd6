"""Timeouts of runs that hang."""

import pytest
from problems import problem
from tiny import tiny_plan

SAVES = ("--save", "run")


@pytest.mark.parametrize(
    ("flags", "world_size", "device", "seconds"),
    [
        (SAVES, 2, "cuda", 1200),
        (SAVES, 1, "cuda", 0),
        (SAVES, 2, "cpu", 0),
        ((), 2, "cuda", 0),
        ((*SAVES, "--distributed-backend", "gloo"), 2, "cuda", 0),
        ((*SAVES, "--hang-timeout", "7"), 2, "cuda", 7),
        ((*SAVES, "--hang-timeout", "7"), 1, "cpu", 7),
        ((*SAVES, "--hang-timeout", "0"), 2, "cuda", 0),
    ],
)
def test_ranks_that_nccl_would_wait_for_have_a_limit(flags, world_size, device, seconds):
    plan = tiny_plan(*flags, world_size=world_size, device=device)
    assert plan.watch.hang_timeout_s == seconds


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((*SAVES, "--hang-timeout", "-1"), "--hang-timeout -1.0 must be at least 0"),
        (("--hang-timeout", "7"), "--hang-timeout needs --save"),
    ],
)
def test_a_limit_that_cannot_be_kept_is_refused(flags, message):
    with problem(message):
        tiny_plan(*flags)
