"""Starting again after a failure, and when not to."""

import os

import pytest
from problems import problem
from tiny import tiny_argv, tiny_config

from megatron.common.errors import ExitCode, RepeatedFailureError
from megatron.training.process import restarts
from megatron.training.process.environment import Launcher, read_launcher
from megatron.training.process.failure import Failure, FailureFile
from megatron.training.process.restarts import (
    code_for,
    refuse_repeated_failure,
    start_through_launcher,
)

ALONE, DEEPSPEED = Launcher("", 0, 0), Launcher("deepspeed", 0, 0)
SAVES = ["--save", "run", "--load", "run", "--save-interval", "5"]


def training(*flags):
    return tiny_config(*SAVES, *flags).training


@pytest.fixture
def executed(monkeypatch, command_line):
    """The commands that this process would have become."""
    commands = []
    monkeypatch.setattr(os, "execv", lambda program, words: commands.append(words))
    command_line("pretrain_gpt.py")
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return commands


def test_a_lone_process_becomes_the_launcher_of_its_own_command(executed):
    argv = tiny_argv("--max-restarts", "3")
    start_through_launcher(training("--max-restarts", "3"), argv, ALONE)
    (words,) = executed
    assert words[1:3] == ["-m", "torch.distributed.run"]
    assert words[words.index("--max-restarts") + 1] == "3"
    assert words[words.index("pretrain_gpt.py") + 1 :] == argv


@pytest.mark.parametrize(
    ("requested", "launcher"), [("0", ALONE), ("0", DEEPSPEED), ("3", Launcher("torch", 3, 1))]
)
def test_no_launcher_is_started_without_restarts_or_with_those_of_the_launcher(
    executed, requested, launcher
):
    start_through_launcher(training("--max-restarts", requested), [], launcher)
    assert executed == []


@pytest.mark.parametrize(
    ("launcher", "messages"),
    [
        (DEEPSPEED, "--max-restarts 3 … torch.distributed.run"),
        (Launcher("torch", 0, 0), "--max-restarts 3 … 0 … before the script"),
    ],
)
def test_a_launcher_that_does_otherwise_is_refused(executed, launcher, messages):
    with problem(messages):
        start_through_launcher(training("--max-restarts", "3"), [], launcher)


def test_ranks_without_a_launcher_that_restarts_are_refused(executed, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with problem("--max-restarts 3 … torch.distributed.run"):
        start_through_launcher(training("--max-restarts", "3"), [], ALONE)


def fail(directory, message, iteration):
    failure = Failure(kind="error", rank=0, iteration=iteration, stage="step", message=message)
    FailureFile(str(directory)).record(failure)


def test_after_the_same_failure_at_the_same_step_there_is_no_hope(tmp_path):
    fail(tmp_path, "port 1", 7)
    fail(tmp_path, "port 2", 7)
    # A person who starts the command anew has mended something.
    for count in (0, 1):
        refuse_repeated_failure(str(tmp_path), Launcher("torch", 5, count))
    with problem("step 7 … port 2", RepeatedFailureError):
        refuse_repeated_failure(str(tmp_path), Launcher("torch", 5, 2))
    fail(tmp_path, "port 3", 8)
    refuse_repeated_failure(str(tmp_path), Launcher("torch", 5, 3))


def test_a_stop_on_request_is_no_reason_to_restart():
    assert code_for(ExitCode.RESUMABLE, ALONE) == ExitCode.RESUMABLE
    assert code_for(ExitCode.RESUMABLE, Launcher("torch", 0, 0)) == ExitCode.RESUMABLE
    assert code_for(ExitCode.RESUMABLE, Launcher("torch", 3, 0)) == ExitCode.FINISHED
    assert code_for(ExitCode.FAILED, Launcher("torch", 3, 0)) == ExitCode.FAILED


def test_what_would_fail_again_ends_a_launcher_that_would_restart(monkeypatch):
    killed = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    restarts.end_launcher(ALONE)
    assert killed == []
    restarts.end_launcher(Launcher("torch", 3, 0))
    assert killed == [os.getppid()]


def test_a_launcher_is_known_by_its_variables(monkeypatch):
    for name in ("TORCHELASTIC_RUN_ID", "CROSS_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert read_launcher() == ALONE
    monkeypatch.setenv("CROSS_SIZE", "1")
    monkeypatch.setenv("LOCAL_SIZE", "2")
    assert read_launcher() == DEEPSPEED
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert read_launcher() == Launcher("torch", 3, 1)
