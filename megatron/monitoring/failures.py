"""What ended the starts of a run that failed, by their failure.json; read without torch."""

import json
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

_NAME = re.compile(r"failure(?:-(\d+))?\.json")


@dataclass(frozen=True)
class Failure:
    """One of them.

    Args:
        at: when; None if the file does not tell.
        iteration: the step that was under way.
        text: kind, place and message.
    """

    at: datetime | None
    iteration: int
    text: str


def failures_in(directory: Path) -> list[Failure]:
    """Return the failures that stand in the directory of a run, the oldest first."""
    numbered = {}
    for file in directory.glob("failure*.json"):
        if match := _NAME.fullmatch(file.name):
            # The one without a number is the last.
            numbered[float(match[1] or "inf")] = file
    return [failure for _, file in sorted(numbered.items()) if (failure := _read(file))]


def time_of(text: Any) -> datetime | None:
    """Return the time, with its zone, that a record tells; None if it does not."""
    if not isinstance(text, str):
        return None
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        return None


def _read(file: Path) -> Failure | None:
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        iteration = int(told["iteration"])
    except (OSError, ValueError, TypeError, KeyError):
        return None  # somebody else's, or just being written
    where = f"rank {told.get('rank')} on {told.get('host')}, {told.get('stage')}"
    text = f"{told.get('kind')} ({where}): {told.get('message')}"
    return Failure(time_of(told.get("time")), iteration, text)
