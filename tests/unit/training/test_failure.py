"""failure.json holds the first cause, whatever came of it elsewhere."""

import json
import multiprocessing

import pytest

from megatron.errors import DataError
from megatron.training.failure import FAILURE, Failure, FailureFile, failure_of, failures_of


def failure(message="disk on fire", kind="error", **words):
    known = {"kind": kind, "rank": 1, "iteration": 7, "stage": "step", "message": message}
    return Failure(**(known | words))


LOST = failure("Connection closed by peer", kind="lost peer", rank=0)


def told(directory):
    return json.loads((directory / FAILURE).read_text())["message"]


def test_the_first_cause_stays(tmp_path):
    first, second = FailureFile(str(tmp_path)), FailureFile(str(tmp_path))
    assert first.record(failure("first"))
    assert not second.record(failure("second"))
    assert not second.record(LOST)
    assert told(tmp_path) == "first"
    assert [file.name for file in tmp_path.iterdir()] == [FAILURE]


def test_what_came_of_a_cause_gives_way_to_it(tmp_path):
    assert FailureFile(str(tmp_path)).record(LOST)
    assert FailureFile(str(tmp_path)).record(failure("cause"))
    assert told(tmp_path) == "cause"
    assert [f.message for f in failures_of(str(tmp_path))] == [LOST.message, "cause"]


def test_that_of_an_earlier_attempt_is_put_away(tmp_path):
    FailureFile(str(tmp_path)).record(failure("attempt 1"))
    FailureFile(str(tmp_path)).own(tidies=True)
    assert not (tmp_path / FAILURE).exists()
    FailureFile(str(tmp_path)).record(failure("attempt 2"))
    assert told(tmp_path) == "attempt 2"
    # This one fails before it has the directory for itself.
    early = FailureFile(str(tmp_path))
    early.record(failure("attempt 3"))
    assert told(tmp_path) == "attempt 3"
    assert [f.message for f in failures_of(str(tmp_path))] == [f"attempt {i}" for i in (1, 2, 3)]


def test_a_directory_of_another_run_is_left_alone(tmp_path):
    (tmp_path / "lock.json").write_text("{}")
    file = FailureFile(str(tmp_path))
    assert not file.record(failure())
    file.own(tidies=True)
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
    messages = [f.message for f in failures_of(str(tmp_path))]
    assert "earlier" in messages
    assert told(tmp_path).startswith("of ")
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


def test_the_same_failure_has_the_same_signature():
    assert failure("port 12").signature == failure("port 345").signature
    assert failure("port 12").signature != failure("disk").signature
    assert failure(iteration=7).signature != failure(iteration=8).signature
    assert failure(iteration=7).signature != LOST.signature
