"""A rank that fails before the first step ends all other ranks, with a cause and without a kill."""

import json
import re
import socket
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from forked import without_head_start
from small_job import Job
from starting import (
    Ended,
    Start,
    die_in_place_of,
    in_place_of,
    nothing,
    run_together,
    sleep,
    stop,
)

from megatron.common.errors import ExitCode
from megatron.training.process.failure import failures_of

LIMIT = ["--hang-timeout", "2"]

# What does not get on, what happens there, and to which rank; and what the run was doing.
STRUCK = {
    "asleep before it meets": (
        ("megatron.training.setup:start_processes", sleep, 1),
        "meeting the other processes",
    ),
    "stopped before it meets": (
        ("megatron.training.setup:start_processes", stop, 0),
        "meeting the other processes",
    ),
    "asleep while it looks for a checkpoint": (
        ("megatron.training.pretrain:choose_checkpoint", sleep, 0),
        "choosing a checkpoint",
    ),
    "asleep in index maps": (
        ("megatron.training.setup:read_datasets", sleep, 0),
        "reading index maps",
    ),
    "stopped while the engine is built": (
        ("megatron.training.setup:build_engine", stop, 1),
        "building the engine",
    ),
}


# Where a rank dies, which one, and what the other one says of it.
DEAD = {
    ("setup:start_processes", 1): "ended before the processes had met",
    ("setup:start_processes", 0): "ended before the processes had met",
    ("setup:build_process_groups", 1): "ended without a message",
}


@pytest.fixture(scope="module")
def hung(
    job_of_two: Job, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Ended]]:
    """Where the runs saved, and how they ended, by what was struck."""
    folder = tmp_path_factory.mktemp("hung")
    starts = {
        name: Start(
            [*job_of_two.flags, *LIMIT],
            folder / name.replace(" ", "-"),
            partial(in_place_of, *where),
        )
        for name, (where, _) in STRUCK.items()
    }
    return _run_together(starts)


@pytest.fixture(scope="module")
def failed(
    job_of_two: Job, tmp_path_factory: pytest.TempPathFactory, taken_port: int
) -> dict[Any, tuple[Path, Ended]]:
    """Where runs saved of which a rank dies, or that cannot meet, and how they ended."""
    folder, flags = tmp_path_factory.mktemp("failed"), job_of_two.flags
    starts: dict[Any, Start] = {
        (moment, struck): Start(
            flags,
            folder / f"dead-{number}",
            partial(die_in_place_of, f"megatron.training.{moment}", struck),
        )
        for number, (moment, struck) in enumerate(DEAD)
    }
    starts["taken port"] = Start(flags, folder / "taken", nothing, port=taken_port)
    address = "no-such-host.invalid"
    starts["unknown address"] = Start(flags, folder / "name", nothing, address=address)
    return _run_together(starts)


def _run_together(starts: Mapping[Any, Start]) -> dict[Any, tuple[Path, Ended]]:
    ended = run_together([*starts.values()])
    return {
        name: (start.save, end) for (name, start), end in zip(starts.items(), ended, strict=True)
    }


@pytest.fixture(scope="module")
def taken_port() -> Iterator[int]:
    """A port where another program listens."""
    with socket.create_server(("127.0.0.1", 0)) as program:
        yield program.getsockname()[1]


@pytest.mark.parametrize("name", STRUCK)
def test_a_rank_that_does_not_get_on_ends_all(
    hung: dict[str, tuple[Path, Ended]], name: str
) -> None:
    save, ended = hung[name]
    (where, does, struck), stage = STRUCK[name]
    assert ended.codes == [ExitCode.FAILED] * 2, "\n".join(ended.outputs)
    record = json.loads((save / "failure.json").read_text())
    assert (record["kind"], record["iteration"], record["stage"]) == ("hang", 0, stage)
    assert record["message"] == "no progress for 10 s (--hang-timeout)"
    waits, alone = f"1 rank ({1 - struck}) in ", f"1 rank ({struck}) "
    alone += "gave no answer" if does is stop else "in wait (tests/faults/starting.py"
    assert [line[: len(waits)] for line in record["groups"]].count(waits) == 1, record["groups"]
    assert any(line.startswith(alone) for line in record["groups"]), record["groups"]
    (output,) = [text for text in ended.outputs if f"hang in {stage}: " in text]
    assert all(line in output for line in record["groups"])
    # One that was stopped leaves as soon as it wakes, and says where it was.
    (folder,) = save.glob("hang-*")
    names = {file.name for file in folder.iterdir()}
    assert names == {"groups.txt", "rank-0.json", "rank-1.json"}
    assert (folder.name == "hang-start-1") is ("meet" in name)


@pytest.mark.parametrize(("moment", "struck"), DEAD)
def test_a_rank_that_dies_before_the_first_step_is_named_without_a_limit_for_hangs(
    failed: dict[Any, tuple[Path, Ended]], moment: str, struck: int
) -> None:
    save, ended = failed[moment, struck]
    assert sorted(map(str, ended.codes)) == ["-9", "1"], ended.outputs
    record = json.loads((save / "failure.json").read_text())
    assert (record["kind"], record["rank"]) == ("lost rank", struck), record
    assert f"rank {struck} (process {record['pid']} on " in record["message"]
    assert DEAD[moment, struck] in record["message"]


def test_tokens_outside_the_vocabulary_are_of_the_files_that_flags_name(
    job_of_two: Job, tmp_path: Path
) -> None:
    ended = job_of_two.run(tmp_path / "save", "--vocab-size", "30", setup=without_head_start)
    assert set(ended.codes) == {ExitCode.MISUSED}, ended.outputs
    assert "is not in the vocabulary of 3" in "\n".join(ended.outputs)


def test_a_taken_port_and_an_unknown_address_end_every_rank(
    failed: dict[Any, tuple[Path, Ended]], taken_port: int
) -> None:
    (save, taken), (_, unknown) = failed["taken port"], failed["unknown address"]
    assert taken.codes == unknown.codes == [ExitCode.FAILED] * 2, (taken, unknown)
    # Who finds it first says it, and the other one that or its own.
    for ended, own in (
        (taken, f"MASTER_PORT={taken_port} is taken on |what listens at 127.0.0.1:{taken_port} "),
        (unknown, "MASTER_ADDR=no-such-host.invalid does not resolve on "),
    ):
        for text in ended.outputs:
            assert re.search(f"^error.*: ({own}|.*failure.json contains the cause)", text, re.M), (
                text
            )
        assert re.search(own, "".join(ended.outputs)), ended.outputs
    # A rank that starts after rank 0 has failed takes its record for that of an earlier attempt.
    messages = [failure.message for failure in failures_of(save)]
    assert any(f"MASTER_PORT={taken_port} is taken" in message for message in messages), messages
    assert not any("Traceback" in text for text in (*taken.outputs, *unknown.outputs))
