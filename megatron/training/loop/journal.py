"""The run's record: one JSON object a line, appended, never rewritten."""

import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from megatron.common.atomic_files import open_regular, require_regular
from megatron.common.errors import CheckpointError, WrongCheckpointError, near, reason
from megatron.training.loop.journal_records import COMPLETE, RecordParser

JOURNAL = "journal.jsonl"
START, ROLLBACK = "start", "rollback"
"""Events after which a run is at an iteration that it may have been at before."""

END = "end"
"""The event of a start that ended normally; one that failed or was killed has none."""


class Journal:
    """Appends records to `directory`/journal.jsonl.

    The run has a unique name, and each start of it is an attempt, counted from 1.
    """

    def __init__(self, directory: Path):
        self.file = directory / JOURNAL
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if self.file.exists():
                require_regular(self.file)
            with self.file.open("a+b") as stream:
                # A run that was killed may have left half a line.
                if stream.tell() and not _ends_a_line(stream):
                    stream.write(b"\n")
        except OSError as error:
            raise WrongCheckpointError(f"--save {directory}: {reason(error, directory)}") from error
        starts = starts_of(directory)
        self.attempt = len(starts)
        named = (record["run"] for record in starts if "run" in record)
        self.run = next(named, None) or secrets.token_hex(4)

    def start(
        self,
        iteration: int,
        system_info: Mapping[str, str],
        flags: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Record that the run starts or resumes after `iteration`, with its system and flags.

        Args:
            flags: the values that differ from their defaults.
        """
        self.attempt += 1
        known = {"iteration": iteration, "run": self.run, "attempt": self.attempt, "at": now()}
        self.write(START, {**known, "with": dict(system_info), "flags": dict(flags)})

    def write(self, event: str, record: dict[str, Any]) -> None:
        """Append `record` under the name of its event.

        Raises:
            CheckpointError: the disk does not take it.
        """
        # JSON has no NaN; a loss that is none is null.
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        line = json.dumps({"event": event, **finite}, allow_nan=False)
        try:
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(line + "\n")
        except OSError as error:
            raise CheckpointError(
                f"{self.file}: {error.strerror}; the run ends, because it cannot record its steps"
            ) from error


def now() -> str:
    """Return the time of a record, with its zone."""
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


def time_of(text: Any) -> datetime | None:
    """Return the time, with its zone, of a record; None if it has none."""
    if not isinstance(text, str):
        return None
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        return None


def read_journal(directory: Path, *, warns: bool = True) -> Iterator[dict[str, Any]]:
    """Yield the records of a run, the oldest first.

    Where the run went on from an older checkpoint, or went back to one, what came after that one
    is left out: it was done again.

    Args:
        warns: whether to warn of a line that is no record; not where it was read before.
    """
    standing: list[dict[str, Any]] = []
    for record in _records(directory, warns=warns):
        if record["event"] in (START, ROLLBACK):
            standing = [r for r in standing if r["iteration"] <= record["iteration"]]
        standing.append(record)
    yield from standing


def starts_of(directory: Path, *, warns: bool = True) -> list[dict[str, Any]]:
    """Return the records of all starts of a run, the oldest first; see `read_journal`."""
    return [record for record in _records(directory, warns=warns) if record["event"] == START]


def every_attempt(directory: Path, iteration: int) -> list[dict[str, Any]]:
    """Return the records of `iteration` from all starts of a run, the oldest first."""
    return [
        r
        for r in _records(directory)
        if r["event"] not in (START, ROLLBACK) and r["iteration"] == iteration
    ]


def _records(directory: Path, *, warns: bool = True) -> Iterator[dict[str, Any]]:
    file = directory / JOURNAL
    parser = RecordParser(file, COMPLETE, warns=warns)
    try:
        with open_regular(file) as stream:
            for line in stream:
                if record := parser.parse(line):
                    yield record
    except (FileNotFoundError, NotADirectoryError) as error:
        raise WrongCheckpointError(
            f"{file}: {error.strerror}; no run has saved there{near(directory)}"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error


def _ends_a_line(stream: BinaryIO) -> bool:
    stream.seek(-1, os.SEEK_END)
    return stream.read(1) == b"\n"
