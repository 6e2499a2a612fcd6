"""History of a run: curves, events and checkpoints, from the records of its journal."""

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

from megatron.checkpointing.manifest import MANIFEST, iteration_of, published_tags
from megatron.common.atomic_files import open_regular
from megatron.common.errors import UnreadableCheckpointError, WrongCheckpointError, near
from megatron.training.loop.journal import END, JOURNAL, ROLLBACK, START, time_of
from megatron.training.loop.journal_records import RecordParser
from megatron.training.process.failure import FAILURE, Failure, failures_of

_STEP, _TRAIN, _EVALUATION, _RANKS = "step", "train", "evaluation", "ranks"
_CURVES = ("loss", "grad_norm", "learning_rate", "seconds", "tokens_per_second")


@dataclass(frozen=True)
class Event:
    """Event of a run, such as a start, a skipped step, a rollback or a failure.

    Args:
        at: time; None if the journal does not record it.
        is_bad: whether the event needs attention.
    """

    at: datetime | None
    iteration: int
    kind: str
    text: str
    is_bad: bool = False


@dataclass
class Steps:
    """Curves over the iterations of a run, without iterations that were rolled back. Null is NaN."""

    iterations: "array[float]" = field(default_factory=lambda: array("d"))
    curves: "dict[str, array[float]]" = field(
        default_factory=lambda: {name: array("d") for name in _CURVES}
    )

    def append(self, iteration: int, values: Mapping[str, float | None]) -> None:
        """Add one step."""
        self.iterations.append(iteration)
        for name, curve in self.curves.items():
            value = values.get(name)
            curve.append(math.nan if value is None else value)

    def forget_after(self, iteration: int) -> None:
        """Remove the steps after `iteration`, which are repeated."""
        kept = bisect_right(self.iterations, iteration)
        for column in (self.iterations, *self.curves.values()):
            del column[kept:]


@dataclass
class History:
    """History of a run. A repeated step is contained once, all events are kept."""

    run: str = ""
    attempt: int = 0
    host: str = ""
    last_at: datetime | None = None
    consumed: dict[str, int] = field(default_factory=dict)  # samples and tokens
    steps: Steps = field(default_factory=Steps)
    intervals: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    end: dict[str, Any] | None = None  # of the last start, if that ended normally

    @property
    def is_empty(self) -> bool:
        """Whether there is no record of the run."""
        return not (self.starts or len(self.steps.iterations) or self.intervals or self.events)

    @property
    def iteration(self) -> int:
        """The last completed step."""
        known = [int(self.steps.iterations[-1])] if self.steps.iterations else []
        known += [records[-1]["iteration"] for records in (self.intervals, self.starts) if records]
        return max(known, default=0)

    def add(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add the next records of the journal."""
        for record in records:
            self.last_at = time_of(record.get("at")) or self.last_at
            self._add(dict(record))

    def _add(self, record: dict[str, Any]) -> None:
        event = record["event"]
        kept = {_TRAIN: self.intervals, _EVALUATION: self.evaluations, _RANKS: self.ranks}
        if event == _STEP:
            self._add_step(record)
        elif event in kept:
            kept[event].append(record)
        else:
            if event in (START, ROLLBACK):
                self._roll_back(record["iteration"])
            if event == START:
                self.starts.append(record)
                self.run, self.attempt = str(record.get("run", "")), len(self.starts)
            self.end = record if event == END else None
            self.events.append(_event_of(record, self.last_at, self.starts))

    def _add_step(self, record: dict[str, Any]) -> None:
        samples = record.get("samples", 0) - record.get("first_sample", 0)
        seconds = record.get("seconds") or math.nan
        self.steps.append(
            record["iteration"],
            {
                "loss": record.get("lm_loss"),
                "grad_norm": record.get("grad_norm"),
                "learning_rate": record.get("learning_rate"),
                "seconds": seconds,
                "tokens_per_second": samples * record.get("seq_length", 0) / seconds,
            },
        )
        self.host = str(record.get("host", self.host))
        self.consumed = {name: record[name] for name in ("samples", "tokens") if name in record}
        self.end = None
        if record.get("skipped") or record.get("lm_loss") is None:
            why = "skipped" if record.get("skipped") else "the loss is NaN or infinite"
            self._add_bad_step(record["iteration"], why)

    def _add_bad_step(self, iteration: int, why: str) -> None:
        """Add an event, or extend the last one if it is about the preceding step."""
        first, last = iteration, self.events[-1] if self.events else None
        was_before = last and last.kind == "step" and last.iteration == iteration - 1
        if last and was_before and last.text.endswith(why):
            first = int(last.text.split()[1].rstrip(":"))
            self.events.pop()
        until = f" to {iteration}" if first < iteration else ""
        text = f"iteration {first}{until}: {why}"
        self.events.append(Event(self.last_at, iteration, "step", text, is_bad=True))

    def _roll_back(self, iteration: int) -> None:
        if iteration < self.iteration:
            self.consumed = {}  # known after the next step
        self.steps.forget_after(iteration)
        for records in (self.intervals, self.evaluations, self.ranks):
            records[:] = [r for r in records if r["iteration"] <= iteration]


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, with a manifest."""

    iteration: int
    at: datetime


def checkpoints_in(directory: Path) -> list[Checkpoint]:
    """Return the checkpoints of a run, the newest first."""
    try:
        tags = published_tags(directory)
    except UnreadableCheckpointError:
        return []  # the disk may answer the next time
    found = []
    for tag in tags:
        iteration = iteration_of(tag)
        try:
            seconds = (directory / tag / MANIFEST).stat().st_mtime
        except OSError:
            continue  # removed meanwhile
        if iteration is not None:
            found.append(Checkpoint(iteration, datetime.fromtimestamp(seconds).astimezone()))
    return found


def events_in(history: History, directory: Path) -> list[Event]:
    """Return the events of a run with its failures, the oldest first."""
    known = list(_with_times(history.events))
    for failure in failures_of(directory):
        at = failure.at.timestamp() if failure.at else math.inf
        event = Event(failure.at, failure.iteration, "failure", failure.text, is_bad=True)
        known.append((event, at))
    return [event for event, _ in sorted(known, key=itemgetter(1))]


def failure_now(history: History, directory: Path) -> Failure | None:
    """Return the failure that ended the last start, if there is one."""
    if not (directory / FAILURE).exists():
        return None  # each start moves earlier failures away
    for failure in failures_of(directory)[-1:]:
        began = time_of(history.starts[-1].get("at")) if history.starts else None
        # The time of a failure is rounded down to seconds.
        if not (began and failure.at) or failure.at >= began.replace(microsecond=0):
            return failure
    return None


def _with_times(events: Iterable[Event]) -> Iterator[tuple[Event, float]]:
    """Yield each event with its time, or the time of the previous event."""
    last = 0.0
    for event in events:
        last = event.at.timestamp() if event.at else last
        yield event, last


def _event_of(
    record: Mapping[str, Any], at: datetime | None, starts: list[dict[str, Any]]
) -> Event:
    kind, iteration = record["event"], record["iteration"]
    if kind == START:
        return Event(at, iteration, kind, _describe_start(starts))
    if kind == ROLLBACK:
        text = f"back to iteration {iteration}: {record.get('why', 'a spike')}"
        if passed := record.get("passed_over"):
            text += f"; iterations {passed[0]} to {passed[1]} are skipped"
        return Event(at, iteration, kind, text, is_bad=True)
    if kind == END:
        return Event(at, iteration, kind, str(record.get("reason", "")))
    values = {k: v for k, v in record.items() if k not in ("event", "iteration", "run", "attempt")}
    text = ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in values.items()
    )
    return Event(at, iteration, kind, text, is_bad=kind != "rank keeps up")


def _describe_start(starts: list[dict[str, Any]]) -> str:
    """Describe a start: number of the attempt, iteration, and flags changed since the last start."""
    record, attempt = starts[-1], len(starts)
    text = f"attempt {attempt} starts after iteration {record['iteration']}"
    if attempt > 1 and "flags" in record and "flags" in starts[-2]:
        before, now = starts[-2]["flags"], record["flags"]
        changed = [
            f"{flag} {now.get(flag, 'not set')} (before: {before.get(flag, 'not set')})"
            for flag in {**before, **now}
            if before.get(flag) != now.get(flag)
        ]
        text += f"; changed flags: {', '.join(changed)}" if changed else ""
    return text


class JournalReader:
    """Reads the new records of `directory`/journal.jsonl, each of them once."""

    def __init__(self, directory: Path):
        self._file = directory / JOURNAL
        self._parser = RecordParser(self._file, warns=True)
        self._read_bytes = 0

    def new_records(self) -> Iterator[dict[str, Any]]:
        """Yield the records written since the last call.

        A damaged line is skipped, with a warning unless a killed run left half of it; a last line
        without a line end is read in the next call.

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
                f"{self._file.parent}: the journal of a run cannot be read ({error.strerror}); give "
                f"the --save directory of the run{near(self._file.parent)}"
            ) from error
