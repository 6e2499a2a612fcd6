"""The journal of a run, read while the run writes it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.common.atomic_files import open_regular
from megatron.common.errors import WrongCheckpointError, near
from megatron.training.loop.journal import JOURNAL
from megatron.training.loop.journal_records import RecordParser


class JournalReader:
    """Reads what is new in `directory`/journal.jsonl, each record once."""

    def __init__(self, directory: Path):
        self._file = directory / JOURNAL
        self._parser = RecordParser(self._file, warns=True)
        self._read_bytes = 0

    def new_records(self) -> Iterator[dict[str, Any]]:
        """Yield the records that were finished since the last call.

        A line that is no record is skipped, with one warning if it is not just half a line of a
        run that was killed; a last line without an end is left for the next call.

        Raises:
            WrongCheckpointError: there is no journal, or it cannot be read.
        """
        try:
            with open_regular(self._file) as stream:
                stream.seek(self._read_bytes)
                for line in stream:
                    if not line.endswith(b"\n"):
                        break
                    self._read_bytes += len(line)
                    if record := self._parser.parse(line):
                        yield record
        except OSError as error:
            raise WrongCheckpointError(
                f"{self._file.parent}: no journal of a run can be read ({error.strerror}); name the "
                f"directory that a run was given as --save{near(self._file.parent)}"
            ) from error
