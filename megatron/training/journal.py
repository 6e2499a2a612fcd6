"""The run's record: one JSON object a line, appended, never rewritten."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.errors import CheckpointError

JOURNAL = "journal.jsonl"


class Journal:
    """Appends records to `directory`/journal.jsonl."""

    def __init__(self, directory: Path):
        self.file = directory / JOURNAL
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.file.touch()
        except OSError as error:
            raise CheckpointError(f"--save {directory}: {error}") from error

    def write(self, event: str, record: dict[str, Any]) -> None:
        """Append `record` under the name of what happened."""
        # JSON has no NaN; a loss that is none is null.
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        line = json.dumps({"event": event, **finite}, allow_nan=False)
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")


def read_journal(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a run, the oldest first.

    Where the run went on from an older checkpoint, what came after that one is left out: it was
    done again.
    """
    with (directory / JOURNAL).open(encoding="utf-8") as stream:
        records = [json.loads(line) for line in stream]
    standing: list[dict[str, Any]] = []
    for record in records:
        if record["event"] == "start":
            standing = [r for r in standing if r["iteration"] <= record["iteration"]]
        standing.append(record)
    yield from standing
