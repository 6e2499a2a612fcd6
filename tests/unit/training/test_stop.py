"""What ends a run, and who may ask for it."""

import os
import signal
import time
from dataclasses import replace

import pytest
from tiny import tiny_plan

from megatron.training.requests import KillSwitch, Signals, TimeLimit, build_requests, first_reason
from megatron.training.state import TrainState
from megatron.training.stop import Stop

PLAN = replace(tiny_plan().training, train_iters=100, train_samples=200)


def reason(state, *requests, **changes):
    return Stop(replace(PLAN, **changes), started_from=0, requests=requests)(state)


def test_a_run_ends_when_its_tokens_are_trained_on():
    stop = Stop(replace(PLAN, train_tokens=50), started_from=0)
    assert stop(TrainState(iteration=4, tokens=49)) is None
    assert stop(TrainState(iteration=4, tokens=50)) == "training is done after 4 iterations"
    assert stop.is_done(TrainState(iteration=4, tokens=50))
    assert not stop.is_done(TrainState(iteration=4, tokens=49))


def test_a_multiple_of_the_exit_interval_that_was_passed_over_counts():
    assert reason(TrainState(iteration=9), exit_interval=8) == "exiting program at iteration 9"


def test_a_file_ends_the_run_and_only_rank_0_looks_for_it(group, tmp_path):
    file = tmp_path / "stop"
    switch = KillSwitch(str(file), looks=True)
    state = TrainState(iteration=3)
    assert reason(state, switch) is None
    file.touch()
    assert reason(state, switch) == f"Detected kill switch at {file}. Exiting"
    assert reason(state, KillSwitch(str(file), looks=False)) is None


def test_the_time_limit_counts_from_the_start(group):
    started_at = time.perf_counter() - 119
    assert first_reason([TimeLimit(2, started_at=started_at, looks=True)]) is None
    assert first_reason([TimeLimit(2, started_at=started_at - 1, looks=False)]) is None
    over = TimeLimit(2, started_at=started_at - 1, looks=True)
    assert first_reason([over]) == "exiting program after 2.0 minutes"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_the_run_and_a_second_one_the_process(group, number):
    usual = signal.getsignal(number)
    signals = Signals()
    try:
        assert signal.getsignal(number) != usual
        assert first_reason([signals]) is None
        os.kill(os.getpid(), number)
        assert first_reason([signals]) == f"exiting program after receiving {number.name}"
        assert signal.getsignal(number) == usual
    finally:
        signals.restore()


def test_the_plan_says_who_may_ask(tmp_path):
    assert build_requests(PLAN, rank=0, started_at=0.0) == []
    wished = replace(PLAN, kill_switch="file", exits_on_signal=True, exit_after_minutes=5)
    requests = build_requests(wished, rank=1, started_at=0.0)
    requests[1].restore()
    assert [type(request) for request in requests] == [KillSwitch, Signals, TimeLimit]
    assert not any(request.is_made() for request in requests)
