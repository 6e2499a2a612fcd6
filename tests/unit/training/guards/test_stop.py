"""What ends a run, and who may ask for it."""

import errno
import os
import signal
import time
from dataclasses import replace

import pytest
from tiny import tiny_plan

from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import ExitCode
from megatron.training.guards.stop import (
    SAVE_FILE,
    KillSwitch,
    LostLauncher,
    Requests,
    SaveFile,
    Signals,
    Stop,
    TimeLimit,
    build_requests,
)
from megatron.training.process.failure import FailureFile
from megatron.training.process.watchdog import Hangs, Watchdog

PLAN = replace(tiny_plan().training, train_iters=100, train_samples=200)


def reason(state, *requests, **changes):
    return Stop(replace(PLAN, **changes), started_from=0, requests=Requests(requests))(state)


def first_reason(requests):
    option, _ = Requests(requests).agree()
    return option and option.reason()


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


NUMBERS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]


@pytest.fixture
def usual_signals():
    """Gives the signals of this process their usual effect again."""
    usual = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, effect in usual.items():
        signal.signal(number, effect)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_ends_the_run(group, usual_signals, number):
    signals = Signals()
    assert first_reason([signals]) is None
    os.kill(os.getpid(), number)
    assert first_reason([signals]) == f"exiting program after receiving {number.name}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_a_shell_or_nohup_ignores_stays_ignored(group, usual_signals, number):
    # As in a background job of a script, whose SIGTERM counts all the same.
    signal.signal(number, signal.SIG_IGN)
    signals = Signals()
    os.kill(os.getpid(), number)
    assert first_reason([signals]) is None
    os.kill(os.getpid(), signal.SIGTERM)
    assert first_reason([signals]) == "exiting program after receiving SIGTERM"


def test_a_second_interrupt_ends_the_process_and_other_signals_do_not(group, usual_signals):
    Signals()
    # Launchers send several for one stop.
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_signals_are_ignored_once_the_run_has_saved_and_leaves(group, usual_signals):
    options = replace(PLAN, exits_on_signal=True)
    requests = build_requests(options, save="", rank=0, started_at=0.0)
    requests.ignore()
    for number in NUMBERS * 2:
        os.kill(os.getpid(), number)
    assert requests.agree()[0] is None


def test_a_lost_launcher_ends_the_run(group):
    assert first_reason([LostLauncher(lambda: False)]) is None
    assert first_reason([LostLauncher(lambda: True)]) == (
        "exiting program because a launcher has ended"
    )


def test_a_request_is_told_from_the_end_of_the_run(group, tmp_path):
    requests = Requests([LostLauncher(lambda: True)])
    stop = Stop(PLAN, started_from=0, requests=requests)
    assert stop(TrainState(iteration=100)) == "training is done after 100 iterations"
    assert stop.exit_code == ExitCode.FINISHED
    assert stop(TrainState(iteration=99)) == requests.ends[0].reason()
    assert stop.exit_code == ExitCode.RESUMABLE


def test_a_kill_switch_ends_without_a_restart(group, tmp_path):
    stop = Stop(PLAN, started_from=0, requests=Requests([KillSwitch(str(tmp_path), looks=True)]))
    assert stop(TrainState(iteration=99)) == f"Detected kill switch at {tmp_path}. Exiting"
    assert stop.exit_code == ExitCode.FINISHED


NOT_FINITE_AT = 7


def saving_stop(tmp_path, saved):
    requests = Requests(save=SaveFile(str(tmp_path), looks=True))

    def save(state):
        saved.append(state.iteration)
        return state.iteration != NOT_FINITE_AT

    return Stop(PLAN, started_from=0, requests=requests, save=save)


def test_a_file_asks_for_a_checkpoint_and_the_run_goes_on(group, tmp_path):
    saved = []
    stop = saving_stop(tmp_path, saved)
    assert stop(TrainState(iteration=1)) is None
    (tmp_path / SAVE_FILE).touch()
    assert stop(TrainState(iteration=0)) is None
    assert saved == []
    assert [stop(TrainState(iteration=i)) for i in (2, 3)] == [None, None]
    assert saved == [2]
    assert not (tmp_path / SAVE_FILE).exists()


def test_a_file_that_asks_for_a_checkpoint_waits_for_a_finite_step(group, tmp_path):
    saved = []
    stop = saving_stop(tmp_path, saved)
    (tmp_path / SAVE_FILE).touch()
    assert [stop(TrainState(iteration=i)) for i in (NOT_FINITE_AT, 8, 9)] == [None] * 3
    assert saved == [NOT_FINITE_AT, 8]
    assert not (tmp_path / SAVE_FILE).exists()


def test_a_file_that_cannot_be_removed_asks_once(group, tmp_path, messages):
    saved = []
    stop = saving_stop(tmp_path, saved)
    (tmp_path / SAVE_FILE / "folder").mkdir(parents=True)
    assert [stop(TrainState(iteration=i)) for i in (2, 3)] == [None, None]
    assert saved == [2]
    assert "cannot be removed" in messages[0]


def test_the_plan_says_who_may_ask(tmp_path, usual_signals):
    empty = build_requests(PLAN, save="", rank=0, started_at=0.0)
    assert (empty.ends, empty.save) == ([], None)
    options = replace(PLAN, kill_switch="file", exits_on_signal=True, exit_after_minutes=5)
    requests = build_requests(options, save=str(tmp_path), rank=1, started_at=0.0)
    kinds = [type(request) for request in requests.ends]
    assert kinds == [KillSwitch, Signals, LostLauncher, TimeLimit]
    (tmp_path / SAVE_FILE).touch()
    assert not any(request.is_made() for request in [*requests.ends, requests.save])


def test_a_run_that_saves_heeds_signals():
    assert not tiny_plan().training.exits_on_signal
    assert tiny_plan("--exit-signal-handler").training.exits_on_signal
    saves = ["--save", "run", "--save-interval", "5"]
    assert tiny_plan(*saves).training.exits_on_signal
    # No loop looks for signals, and there is nothing to save.
    assert not tiny_plan(*saves, "--load", "run", "--eval-only").training.exits_on_signal


def test_a_disk_that_does_not_answer_for_a_moment_asks_for_nothing(tmp_path, os_calls):
    watchdog = Watchdog(FailureFile(""), rank=0)
    watchdog.arm(Hangs(1e6, tmp_path / "hang", 1))
    os_calls("stat", errno.ESTALE)
    assert not KillSwitch(str(tmp_path / "stop"), looks=True).is_made()
    assert not SaveFile(str(tmp_path), looks=True).is_made()
    # It would have ended the thread that watches.
    assert not watchdog.is_stuck()
