"""Ranks that end before they meet are known to those of their host."""

import json
import multiprocessing
import os
import threading
import time

from megatron.common.errors import ExitCode
from megatron.training.process import starting_peers
from megatron.training.process.failure import FailureFile
from megatron.training.process.starting_peers import StartingPeers
from megatron.training.process.watchdog import Watchdog

FORK = multiprocessing.get_context("fork")
WAIT_S = 60


def announces(rank, run, folder, ready, closes):
    own = StartingPeers(rank, run, folder)
    if closes:
        own.close()
    ready.set()
    time.sleep(WAIT_S)


def started(rank, folder, run="run", *, closes=False):
    ready = FORK.Event()
    process = FORK.Process(target=announces, args=(rank, run, folder, ready, closes), daemon=True)
    process.start()
    assert ready.wait(WAIT_S)
    return process


def kill(process):
    process.kill()
    process.join()


def looks(folder, run="run"):
    """Return the ranks that have started, and those that have ended, as a sibling sees them."""
    results = FORK.Queue()

    def find():
        peers = StartingPeers(0, run, folder).peers()
        results.put(
            [
                sorted(each.rank for each in found)
                for found in (peers.on_this_host(), peers.ended_peers())
            ]
        )

    process = FORK.Process(target=find)
    process.start()
    found = results.get(timeout=WAIT_S)
    process.join()
    return found


def test_a_rank_that_died_before_another_started_is_known(tmp_path):
    processes = [started(rank, tmp_path) for rank in (1, 2)]
    processes += [started(3, tmp_path, "another run"), started(4, tmp_path, closes=True)]
    kill(processes[1])
    assert looks(tmp_path) == [[0, 1, 2], [2]]
    for process in processes:
        kill(process)


def test_a_rank_that_is_started_again_has_not_ended(tmp_path):
    kill(started(1, tmp_path))
    assert looks(tmp_path) == [[0, 1], [1]]
    again = started(1, tmp_path)
    assert looks(tmp_path) == [[0, 1], []]
    kill(again)


def test_a_rank_of_an_attempt_before_is_none_of_this_one(tmp_path, monkeypatch):
    kill(started(1, tmp_path))
    monkeypatch.setattr(starting_peers, "_APART_S", -3600.0)
    assert looks(tmp_path) == [[0], []]


def test_damaged_and_foreign_files_are_passed_over(tmp_path):
    prefix = StartingPeers(0, "run", tmp_path)._prefix
    for name, content in (("1", ""), ("x", "1 1"), ("2", "a b"), ("3", "1")):
        (tmp_path / f"{prefix}{name}").write_text(content)
    assert [peer.rank for peer in StartingPeers(0, "run", tmp_path).peers().on_this_host()] == [0]


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path):
    other = started(1, tmp_path)
    tmp_path.chmod(0o777)
    assert looks(tmp_path) == [[0], []]
    tmp_path.chmod(0o700)
    assert looks(tmp_path) == [[0, 1], []]
    kill(other)


def test_old_files_are_removed(tmp_path):
    old = tmp_path / "start-1-0-0"
    old.touch()
    os.utime(old, (0, 0))
    StartingPeers(0, "run", tmp_path)
    assert not old.exists()


def waits(folder):
    watchdog = Watchdog(
        FailureFile(str(folder)),
        rank=0,
        starting=StartingPeers(0, "run", folder),
        peer_grace_s=0.5,
    )
    with watchdog.watching():
        watchdog.enter_stage("meeting the other processes")
        threading.Event().wait(WAIT_S)


def test_a_rank_leaves_when_another_dies_before_the_rendezvous(tmp_path):
    other = started(1, tmp_path)
    kill(other)
    process = FORK.Process(target=waits, args=(tmp_path,))
    process.start()
    process.join(WAIT_S)
    assert process.exitcode == ExitCode.FAILED
    record = json.loads((tmp_path / "failure.json").read_text())
    assert (record["kind"], record["rank"], record["pid"]) == ("lost rank", 1, other.pid)
    assert "ended before the processes had met" in record["message"]
