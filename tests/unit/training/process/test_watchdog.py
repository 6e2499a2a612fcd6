"""What ends a rank that no longer moves, and one whose launcher has ended."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from problems import problem

from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import (
    ConfigError,
    DataError,
    ExitCode,
    PeerLeftError,
    WrongCheckpointError,
    WrongDataError,
)
from megatron.common.process_identity import start_of
from megatron.training.loop.loop import Hook
from megatron.training.process import watchdog as module
from megatron.training.process.dead_ranks import Peers, this_process
from megatron.training.process.failure import FAILURE, Failure, FailureFile
from megatron.training.process.launchers import Launchers
from megatron.training.process.watchdog import Hangs, Watchdog, next_start_folder
from megatron.training.run import StepProgress, WatchedHook

FORK = multiprocessing.get_context("fork")
WAIT_S = 60
POLL_S, patience_s = module._POLL_S, module._patience_s
REPOSITORY = Path(__file__).resolve().parents[4]


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch):
    """Look more often than every second, in forks too, but wait as long for other ranks."""
    monkeypatch.setattr(module, "_POLL_S", 0.1)
    monkeypatch.setattr(module, "_patience_s", lambda hangs: 5.0)


def in_processes(count, body, *words):
    """Return the exit codes of `count` forks that run body(rank, *words)."""
    processes = [FORK.Process(target=body, args=(rank, *words)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(WAIT_S)
        assert process.exitcode is not None, "it still lives"
    return [process.exitcode for process in processes]


def read(directory):
    return json.loads((directory / FAILURE).read_text())


def stuck_in_data(ended):
    ended.wait()


def stuck_in_collective(ended):
    ended.wait()


def hangs(rank, directory, world_size=3):
    watchdog = Watchdog(FailureFile(str(directory)), rank=rank)
    with watchdog.watching():
        watchdog.arm(Hangs(0.5, directory / "hang", world_size))
        for iteration in (1, 2):
            watchdog.enter_step(iteration)
        (stuck_in_data if rank == 1 else stuck_in_collective)(threading.Event())


def test_a_hang_ends_all_ranks_and_says_who_was_where(tmp_path):
    assert in_processes(3, hangs, tmp_path) == [ExitCode.FAILED] * 3
    record = read(tmp_path)
    assert (record["kind"], record["iteration"], record["stage"]) == ("hang", 2, "step")
    data, collective = record["groups"]
    assert data.startswith("1 rank (1) in wait (tests/unit/training/process/test_watchdog.py:")
    assert collective.startswith(
        "2 ranks (0, 2) in wait (tests/unit/training/process/test_watchdog.py:"
    )
    stacks = json.loads((tmp_path / "hang/rank-1.json").read_text())
    assert "stuck_in_data" in str(stacks["threads"])


def waits_for_a_lost_rank(rank, directory, peers, has_cause):
    """As nccl does: without an error."""
    failures = FailureFile(str(directory))
    watchdog = Watchdog(failures, rank=rank, peer_grace_s=0.5)
    watchdog.peers = Peers([this_process(rank), *peers])
    watchdog.follows_peers = True
    watchdog.before_leaving = (directory / "published").touch
    with watchdog.watching():
        watchdog.enter_step(7)
        if has_cause:
            FailureFile(str(directory)).record(
                Failure(kind="error", rank=5, iteration=7, stage="step", message="no such sample")
            )
        threading.Event().wait(WAIT_S)


@pytest.mark.parametrize("has_cause", [False, True])
def test_a_rank_leaves_those_that_nccl_would_wait_for(tmp_path, has_cause):
    lost = FORK.Process(target=time.sleep, args=(WAIT_S,))
    lost.start()
    peer = replace(this_process(3), pid=lost.pid, started=start_of(lost.pid))
    lost.kill()
    lost.join()
    others = [] if has_cause else [peer]
    codes = in_processes(1, waits_for_a_lost_rank, tmp_path, others, has_cause)
    assert codes == [ExitCode.FAILED]
    record = read(tmp_path)
    assert (record["kind"], record["rank"]) == (("error", 5) if has_cause else ("lost rank", 3))
    assert record["iteration"] == 7
    assert has_cause or "rank 3 (process" in record["message"]
    assert (tmp_path / "published").exists()


def hangs_while_it_saves(rank, directory, seconds):
    module._patience_s = lambda hangs: 1.0
    watchdog, loose = Watchdog(FailureFile(str(directory)), rank=0), threading.Event()

    def publish():
        assert read(directory)["kind"] == "hang"
        loose.set()
        time.sleep(seconds)
        (directory / "published").touch()

    watchdog.before_leaving = publish
    with watchdog.watching():
        watchdog.arm(Hangs(0.2, directory / "hang", 1))
        for iteration in (1, 2):
            watchdog.enter_step(iteration)
        loose.wait()
        watchdog.enter_step(3)
        (directory / "went on").touch()


@pytest.mark.parametrize(("seconds", "left"), [(0.2, ["published"]), (600, [])])
def test_a_hung_run_publishes_what_it_writes_and_waits_only_so_long(tmp_path, seconds, left):
    codes = in_processes(1, hangs_while_it_saves, tmp_path, seconds)
    assert codes == [ExitCode.FAILED]
    assert [name for name in ("published", "went on") if (tmp_path / name).exists()] == left


def tells(rank, directory):
    sys.stderr = (directory / f"output-{rank}").open("w")
    # Not writable: the link to the record fails.
    os.link = lambda *words: (_ for _ in ()).throw(OSError("no links here"))
    hangs(rank, directory, 2)


def test_a_hang_is_told_where_it_cannot_be_written_down(tmp_path):
    assert in_processes(2, tells, tmp_path) == [ExitCode.FAILED] * 2
    assert not (tmp_path / FAILURE).exists()
    assert "hang in step 2: no progress for 0.5 s" in (tmp_path / "output-0").read_text()
    assert (tmp_path / "output-1").read_text() == ""


def is_stopped(rank, directory):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    hangs(rank, directory, 2)


def test_a_rank_that_cannot_answer_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_patience_s", lambda hangs: 1.0)
    processes = [FORK.Process(target=is_stopped, args=(rank, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    processes[0].join(WAIT_S)
    processes[1].kill()
    assert processes[0].exitcode == ExitCode.FAILED
    groups = read(tmp_path)["groups"]
    assert any(line.startswith("1 rank (1) gave no answer") for line in groups)


def test_a_rank_of_a_larger_world_polls_the_disk_less_often(tmp_path, os_calls):
    polls = os_calls("stat")
    with ExitStack() as stack:
        for size in (8, 16384):
            watchdog = Watchdog(FailureFile(""), rank=1)
            watchdog.arm(Hangs(600.0, tmp_path / str(size), size))
            stack.enter_context(watchdog.watching())
        give_up_at = time.monotonic() + WAIT_S
        while polls.count(f"{tmp_path}/8") < 4 and time.monotonic() < give_up_at:
            time.sleep(0.05)
    # Once in 164 s, so that all of them together poll it 100 times a second.
    assert polls.count(f"{tmp_path}/8") >= 4 and polls.count(f"{tmp_path}/16384") <= 1


def test_stacks_of_a_larger_world_are_waited_for_longer_than_its_ranks_poll(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_POLL_S", POLL_S)
    found = [patience_s(Hangs(600.0, tmp_path, size)) for size in (1, 200, 16384)]
    # Without a quarter of the timeout: 5 polls of a second, or 1.5 of 163.84 s.
    assert [seconds - 150.0 for seconds in found] == pytest.approx([5.0, 5.0, 245.76])
    assert patience_s(Hangs(2.0, tmp_path, 1)) == pytest.approx(5.5)


def test_the_start_the_first_step_and_saves_may_take_longer(tmp_path, clock):
    def allowance(watchdog, passed_s):
        clock.pass_time(passed_s)
        stuck = watchdog.is_stuck()
        watchdog.record_progress()
        return "stuck" if stuck else "waits"

    watchdog = Watchdog(FailureFile(""), rank=0)
    watchdog.arm(Hangs(10.0, tmp_path / "hang", 1))
    seen = []
    for stage in ("meeting", "loading"):
        watchdog.enter_stage(stage)
        assert [allowance(watchdog, passed_s) for passed_s in (80, 100)] == ["waits", "stuck"]
    watchdog.arm(Hangs(100.0, tmp_path / "hang", 1))
    assert [allowance(watchdog, passed_s) for passed_s in (490, 510)] == ["waits", "stuck"]
    watchdog.arm(Hangs(10.0, tmp_path / "hang", 1))

    class Looks(Hook):
        def after_step(self, state, step):
            seen.append((watchdog.stage, allowance(watchdog, 40), allowance(watchdog, 60)))

    progress, state = StepProgress(watchdog), TrainState()
    progress.before_step(state)
    Looks().after_step(state, None)
    WatchedHook(Looks(), watchdog, "save", longer=True).after_step(state, None)
    WatchedHook(Looks(), watchdog, "evaluation").after_step(state, None)
    progress.before_step(TrainState(iteration=1))
    Looks().after_step(state, None)
    assert seen == [
        ("step", "waits", "stuck"),
        ("save", "waits", "stuck"),
        ("evaluation", "stuck", "stuck"),
        ("step", "stuck", "stuck"),
    ]
    assert watchdog.iteration == 2


def waits_patiently(rank, directory):
    watchdog = Watchdog(FailureFile(str(directory)), rank=1)
    with watchdog.watching():
        watchdog.arm(Hangs(1e6, directory / "hang", 2))
        # Rank 0 has found a hang: all leave their stacks.
        module._patience_s = lambda hangs: 0.5
        (directory / "hang").mkdir()
        threading.Event().wait()


def test_a_rank_that_waits_leaves_when_another_has_found_a_hang(tmp_path):
    assert in_processes(1, waits_patiently, tmp_path) == [ExitCode.FAILED]
    names = {file.name for file in (tmp_path / "hang").iterdir()}
    assert names == {"groups.txt", "rank-1.json"}


def hangs_on_a_dead_disk(rank, directory):
    sys.stderr = (directory / "output").open("w")
    module._patience_s = lambda hangs: 0.0
    module.write_stacks = lambda *words: threading.Event().wait()
    hangs(rank, directory, 1)


def test_a_hang_ends_where_the_disk_does_not_answer(tmp_path):
    assert in_processes(1, hangs_on_a_dead_disk, tmp_path) == [ExitCode.FAILED]
    assert (tmp_path / "output").read_text() == (
        "error: hang in step: no progress for 0.5 s (--hang-timeout), and "
        f"{tmp_path} does not answer\n"
    )


def test_ranks_find_a_folder_without_asking(tmp_path):
    assert next_start_folder(tmp_path / "none").name == "hang-start-1"
    (tmp_path / "hang-start-1").mkdir()
    assert next_start_folder(tmp_path) == tmp_path / "hang-start-2"


def test_a_start_ends_when_another_rank_has_said_why_it_fails(tmp_path):
    waits, fails = (Watchdog(FailureFile(str(tmp_path)), rank=rank) for rank in range(2))
    waits.raise_if_over()
    with pytest.raises(DataError), fails.watching():
        raise DataError("the disk of this host is full")
    with problem("another rank … failure.json", PeerLeftError), waits.watching():
        waits.raise_if_over()
    assert read(tmp_path)["message"] == "DataError: the disk of this host is full"


def test_other_ranks_end_with_the_exit_code_of_the_cause(tmp_path):
    waits, loses_it, fails = (Watchdog(FailureFile(str(tmp_path)), rank=rank) for rank in range(3))
    fails.write_down(WrongDataError("corpus.bin is damaged"))
    assert read(tmp_path)["exit_code"] == ExitCode.MISUSED
    with pytest.raises(PeerLeftError) as left:
        waits.raise_if_over()
    assert left.value.exit_code == ExitCode.MISUSED
    with pytest.raises(PeerLeftError) as left, loses_it.watching():
        raise RuntimeError("Connection closed by peer")
    assert left.value.exit_code == ExitCode.MISUSED


def orphan(rank, directory, pids, saves):
    os.setsid()
    watchdog = Watchdog(FailureFile(str(directory)), rank=0, launchers=Launchers(is_parent=True))
    watchdog.saves_when_lost = saves
    pids.put(os.getpid())
    with watchdog.watching():
        while not (saves and watchdog.is_launcher_lost()):
            time.sleep(0.05)
    (directory / "left").touch()
    os._exit(0)


def launcher(rank, directory, pids, saves):
    child = os.fork()
    if not child:
        orphan(rank, directory, pids, saves)
    time.sleep(600)


@pytest.mark.parametrize("saves", [True, False])
def test_a_rank_follows_a_launcher_that_was_killed(tmp_path, saves):
    pids = FORK.Queue()
    process = FORK.Process(target=launcher, args=(0, tmp_path, pids, saves))
    process.start()
    child = pids.get(timeout=WAIT_S)
    process.kill()
    process.join()
    give_up_at = time.monotonic() + WAIT_S
    while _lives(child) and time.monotonic() < give_up_at:
        time.sleep(0.1)
    assert not _lives(child)
    assert (tmp_path / "left").exists() is saves
    assert saves or read(tmp_path)["kind"] == "lost launcher"


def _lives(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def test_without_a_launcher_a_parent_may_end():
    assert not Launchers(is_parent=False).are_gone()
    assert not Launchers(is_parent=True).are_gone()


def test_what_ends_a_run_is_written_down_with_its_step(tmp_path):
    watchdog = Watchdog(FailureFile(str(tmp_path)), rank=3)
    with pytest.raises(DataError), watchdog.watching():
        watchdog.enter_step(5)
        raise DataError("no data")
    record = read(tmp_path)
    assert (record["rank"], record["iteration"], record["message"]) == (3, 5, "DataError: no data")


def loses(watchdog, becomes=RuntimeError):
    """Meet a lost connection on rank 0 while the process of rank 1 is gone."""
    watchdog.peers = Peers([this_process(0), replace(this_process(1), started="1")])
    with pytest.raises(becomes), watchdog.watching():
        raise RuntimeError("Connection closed by peer")


def test_only_a_rank_that_left_without_a_word_is_said_to_have_vanished(tmp_path, messages):
    for directory in ("", str(tmp_path / "killed")):
        loses(Watchdog(FailureFile(directory), rank=0))
        assert messages.pop().startswith(f"rank 1 (process {os.getpid()} on ")
    stays, leaves = (Watchdog(FailureFile(str(tmp_path)), rank=rank) for rank in range(2))
    with pytest.raises(DataError), leaves.watching():
        raise DataError("no such sample")
    loses(stays, becomes=PeerLeftError)
    assert messages == []
    assert read(tmp_path)["message"] == "DataError: no such sample"


@pytest.mark.parametrize("kind", [ConfigError, WrongDataError, WrongCheckpointError])
def test_wrong_flags_and_what_they_name_are_no_failure_of_a_run(tmp_path, kind):
    with pytest.raises(kind), Watchdog(FailureFile(str(tmp_path / "x")), rank=0).watching():
        raise kind("--seed 0")
    assert not (tmp_path / "x").exists()


def test_the_launcher_of_a_launcher_counts_if_it_is_deepspeed(tmp_path):
    # deepspeed starts a launcher, which starts the ranks; here each starts the next.
    middle = tmp_path / "launch.py"
    middle.write_text(
        "import os, sys, time\n"
        f"sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "if os.fork():\n    time.sleep(600)\n"
        "from megatron.training.process.launchers import Launchers\n"
        "launchers = Launchers(is_parent=True)\n"
        "print('are gone:', launchers.are_gone(), flush=True)\n"
        "while not launchers.are_gone():\n    time.sleep(0.05)\n"
        "print('gone', os.getppid(), flush=True)\n"
    )
    top = tmp_path / "deepspeed"
    top.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, {str(middle)!r}])\n")
    job = subprocess.Popen([sys.executable, str(top)], stdout=subprocess.PIPE, text=True)
    assert job.stdout.readline() == "are gone: False\n"
    job.kill()
    job.wait()
    word, parent = job.stdout.readline().split()
    os.kill(int(parent), signal.SIGKILL)
    job.stdout.close()
    assert word == "gone"
