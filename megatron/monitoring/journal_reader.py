"""The journal of a run, read while the run writes it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.errors import WrongCheckpointError
from megatron.training.journal import JOURNAL


class JournalReader:
    """Reads what is new in `directory`/journal.jsonl, each record once."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._read_bytes = 0

    def new_records(self) -> Iterator[dict[str, Any]]:
        """Yield the records that were finished since the last call.

        What is no record, a half line of a run that was killed, is passed over; a last line
        without an end is left for the next call.

        Raises:
            WrongCheckpointError: there is no journal, or it cannot be read.
        """
        try:
            with (self._directory / JOURNAL).open("rb") as stream:
                stream.seek(self._read_bytes)
                for line in stream:
                    if not line.endswith(b"\n"):
                        break
                    self._read_bytes += len(line)
                    if record := _record_in(line):
                        yield record
        except OSError as error:
            raise WrongCheckpointError(
                f"{self._directory}: no journal of a run can be read ({error.strerror}); name the "
                "directory that a run was given as --save"
            ) from error


def _record_in(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    is_one = isinstance(record.get("event"), str) and isinstance(record.get("iteration"), int)
    return record if is_one else None
