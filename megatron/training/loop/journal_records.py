"""Records of a run's journal (JSONL); skips damaged lines and lines of other versions."""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

COMPLETE = {
    "step": (
        *("first_sample", "samples", "tokens", "seq_length", "lm_loss", "learning_rate"),
        *("loss_scale", "skipped", "seconds"),
    ),
    "evaluation": ("set", "lm_loss", "ppl"),
    "task": ("set", "epoch"),
}
"""Required fields of an event's records, for readers that depend on them."""

_LARGEST = 2**63


class RecordParser:
    """Parses the lines of the journal `file`; warns once of a line that is no record.

    Half a line, which a killed run leaves, is no JSON, and skipped without a warning.

    Args:
        complete: keys that the records of an event must have, by event.
        warns: whether to warn; for files that were read before.
    """

    def __init__(
        self, file: Path, complete: Mapping[str, tuple[str, ...]] | None = None, *, warns: bool
    ):
        self._file = file
        self._complete = complete or {}
        self._warns = warns
        self._line = 0

    def parse(self, line: str | bytes) -> dict[str, Any] | None:
        """Return the record in the next line; None if it is no record."""
        self._line += 1
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return None
        problem = _problem(record, self._complete)
        if problem and self._warns:
            self._warns = False
            log.warning(
                "%s, line %d: %s; the line is skipped, and so are others like it",
                *(self._file, self._line, problem),
            )
        return None if problem else record


def _problem(record: Any, complete: Mapping[str, tuple[str, ...]]) -> str:
    """Return why `record` is none of this version's; "" if it is one."""
    if not isinstance(record, dict):
        return "no record of a run"
    for name in ("event", "iteration"):
        if name not in record:
            return f"a record without {name}"
    event = record["event"]
    wrong = [name for name in record if name in _SHAPES and not _SHAPES[name](record[name])]
    if wrong:
        return f"a record whose {wrong[0]} is {str(record[wrong[0]])[:40]!r}"
    missing = [name for name in complete.get(event, ()) if name not in record]
    return f"a record of event {event!r} without {missing[0]}" if missing else ""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return True
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST


def _is_number_or_null(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_count, value))


_SHAPES: dict[str, Callable[[Any], bool]] = {
    name: is_right
    for is_right, names in (
        (_is_count, "iteration first_sample samples tokens seq_length attempt train_iters"),
        (_is_number_or_null, "loss lm_loss sop_loss grad_norm learning_rate ppl eta_s"),
        (_is_number, "seconds loss_scale mfu hfu allocated_gib reserved_gib resident_gib"),
        (_is_number, "host_available_gib"),
        (lambda value: isinstance(value, bool), "skipped"),
        (lambda value: isinstance(value, str), "event run at host set"),
        (lambda value: isinstance(value, dict), "flags with"),
        (_is_pair, "passed_over"),
        (lambda value: isinstance(value, list) and all(map(_is_pair, value)), "all_passed_over"),
    )
    for name in names.split()
}
"""Whether the value of each key that readers compute with is of its kind, by key."""
