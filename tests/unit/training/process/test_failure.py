"""failure.json holds the first cause, whatever came of it elsewhere."""

import json
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
from problems import require_problem

from megatron.checkpointing.lock import hold_lock
from megatron.common.errors import DataError, WrongDataError
from megatron.common.process_identity import start_of
from megatron.training.process import dead_ranks as peers_module
from megatron.training.process.dead_ranks import Peer, Peers, by_host, this_process
from megatron.training.process.failure import FAILURE, Failure, FailureFile, failure_of, failures_of


def failure(message="disk on fire", kind="error", **words):
    known = {"kind": kind, "rank": 1, "iteration": 7, "stage": "step", "message": message}
    return Failure(**(known | words))


LOST_BY_GLOO = "Connection closed by peer [127.0.0.1]:1"
LOST = failure("Connection closed by peer", kind="lost peer", rank=0)


def reported(directory):
    return json.loads((directory / FAILURE).read_text())["message"]


def test_the_first_cause_stays(tmp_path):
    first, second = FailureFile(str(tmp_path)), FailureFile(str(tmp_path))
    assert first.record(failure("first"))
    assert not second.record(failure("second"))
    assert not second.record(LOST)
    assert reported(tmp_path) == "first"
    assert [file.name for file in tmp_path.iterdir()] == [FAILURE]


def test_what_came_of_a_cause_gives_way_to_it(tmp_path):
    assert FailureFile(str(tmp_path)).record(LOST)
    assert FailureFile(str(tmp_path)).record(failure("cause"))
    assert reported(tmp_path) == "cause"
    assert [f.message for f in failures_of(tmp_path)] == [LOST.message, "cause"]


def here(rank, pid, *, numbers=None):
    own = this_process(rank)
    return replace(own, pid=pid, started=start_of(pid) or "1", numbers=numbers or own.numbers)


def lost(peers):
    error = RuntimeError(LOST_BY_GLOO)
    return failure_of(error, rank=0, iteration=7, stage="step", peers=Peers(peers))


def test_who_was_lost_is_told_before_what_came_of_it(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    peers = [this_process(0), here(1, os.getppid()), replace(here(2, gone.pid), started="1")]
    gone.wait()
    found = lost(peers)
    assert (found.kind, found.rank, found.pid) == ("lost rank", 2, gone.pid)
    host = socket.gethostname()
    assert found.message.startswith(f"rank 2 (process {gone.pid} on {host}) ended without a m")
    assert found.message.endswith("rank 0 then failed with: RuntimeError: " + LOST_BY_GLOO)
    # It takes the place of what says less, and gives way to a cause.
    file = FailureFile(str(tmp_path))
    assert file.record(LOST)
    assert file.record(found)
    assert not file.record(LOST)
    assert file.record(failure("cause"))
    assert reported(tmp_path) == "cause"


def test_a_rank_that_left_with_a_word_did_not_vanish(tmp_path):
    file = FailureFile(str(tmp_path))
    assert file.record(failure("Connection reset", kind="lost peer", rank=2))
    assert not file.record(failure("vanished", kind="lost rank", rank=2))
    assert file.record(failure("vanished", kind="lost rank", rank=1))


def test_a_rank_elsewhere_is_told_by_its_host(monkeypatch):
    monkeypatch.setattr(peers_module, "_CLOSING_S", 0.1)
    others = [replace(here(n, 1, numbers="far"), host="far") for n in (1, 2)]
    found = lost([this_process(0), *others])
    assert (found.kind, found.rank) == ("lost peer", 0)
    require_problem("far (ranks 1-2) … rank 0", [found.message])
    assert lost([this_process(0)]).message == f"RuntimeError: {LOST_BY_GLOO}"


def test_that_of_an_earlier_attempt_is_put_away(tmp_path):
    FailureFile(str(tmp_path)).record(failure("attempt 1"))
    FailureFile(str(tmp_path)).put_stale_away()
    assert not (tmp_path / FAILURE).exists()
    FailureFile(str(tmp_path)).record(failure("attempt 2"))
    assert reported(tmp_path) == "attempt 2"
    # This one fails before it has the directory for itself.
    early = FailureFile(str(tmp_path))
    early.record(failure("attempt 3"))
    assert reported(tmp_path) == "attempt 3"
    assert [f.message for f in failures_of(tmp_path)] == [f"attempt {i}" for i in (1, 2, 3)]


def test_a_directory_of_another_run_is_left_alone(tmp_path):
    (tmp_path / "lock.json").write_text("{}")
    file = FailureFile(str(tmp_path))
    assert not file.record(failure())
    file.put_stale_away()
    file.follow(this_process(0))
    assert not file.record(failure())
    (tmp_path / "lock.json").unlink()
    with hold_lock(tmp_path):
        assert not FailureFile(str(tmp_path)).record(failure())
        assert file.record(failure())


def test_nothing_is_written_without_a_directory_or_where_that_is_not_allowed(tmp_path):
    assert not FailureFile("").record(failure())
    (tmp_path / "file").touch()
    assert not FailureFile(str(tmp_path / "file")).record(failure())


def test_of_many_processes_one_writes(tmp_path):
    context = multiprocessing.get_context("fork")
    # All see the file of an earlier attempt and want it away at once.
    FailureFile(str(tmp_path)).record(failure("earlier"))
    barrier, won = context.Barrier(8), context.Queue()

    def one(rank):
        file = FailureFile(str(tmp_path))
        barrier.wait()
        won.put(file.record(failure(f"of {rank}")))

    processes = [context.Process(target=one, args=(rank,)) for rank in range(8)]
    for process in processes:
        process.start()
    wins = [won.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sum(wins) >= 1
    messages = [f.message for f in failures_of(tmp_path)]
    assert "earlier" in messages
    assert reported(tmp_path).startswith("of ")
    assert sorted(file.name for file in tmp_path.iterdir() if "failure" not in file.name) == []


@pytest.mark.parametrize(
    ("message", "kind"),
    [("[gloo] Connection closed by peer [127.0.0.1]:123", "lost peer"), ("no data", "error")],
)
def test_an_exception_becomes_a_record(message, kind):
    try:
        raise DataError(message)
    except DataError as error:
        record = failure_of(error, rank=3, iteration=9, stage="step")
    assert (record.kind, record.rank, record.iteration) == (kind, 3, 9)
    assert record.message == f"DataError: {message}"
    assert "test_failure.py" in record.traceback


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (WrongDataError("cut"), 2), (OSError(), 1)]
)
def test_the_record_has_the_exit_code_of_its_rank(error, code):
    assert failure_of(error, rank=0, iteration=1, stage="step").exit_code == code


def test_the_same_failure_has_the_same_signature():
    assert failure("port 12").signature == failure("port 345").signature
    assert failure("port 12").signature != failure("disk").signature
    assert failure(iteration=7).signature != failure(iteration=8).signature
    assert failure(iteration=7).signature != LOST.signature


def test_thousands_of_ranks_have_the_processes_of_their_host_and_few_names():
    everyone = [
        Peer(rank, f"host-{rank // 8}", 100 + rank % 8, "1", f"space-{rank // 8}")
        for rank in range(1024)
    ]
    found = by_host(everyone)
    here, elsewhere = found[17]
    assert [peer.rank for peer in here] == [*range(16, 24)]
    assert elsewhere.startswith("host-0 (ranks 0-7), host-1 (ranks 8-15), host-3 (ranks 24-31)")
    assert elsewhere.endswith("one of 119 other hosts") and "host-2 " not in elsewhere
    assert len(pickle.dumps(found[17])) < 2000
    assert by_host(everyone[:8])[0][1] == ""
