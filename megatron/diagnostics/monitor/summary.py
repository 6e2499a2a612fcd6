"""Summary of a run: state, speed, memory, events, and the view of all of them in a terminal."""

import math
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from statistics import mean
from textwrap import wrap
from typing import Any

from megatron.checkpointing.lock import dead_owner
from megatron.diagnostics.monitor.history import History, checkpoints_in, events_in, failure_now

_SILENT_S, _SILENT_STEPS = 120.0, 20
"""Seconds, and number of steps, without a record after which a run is reported as silent."""

NEXT_STEP = (
    "what to do: docs/troubleshooting.md, for error messages; "
    "docs/stopping.md, for exit codes, failure.json and restarts"
)
"""Advice for a run that needs attention."""

_RECENT = 20  # steps of the reported speed


def state_of(history: History, directory: Path, now: datetime) -> tuple[str, bool]:
    """Return the state of the run, and whether it needs attention."""
    if history.end:
        return f"ended: {history.end.get('reason', '')}", False
    if failure := failure_now(history, directory):
        return f"failed in iteration {failure.iteration}: {failure.text}", True
    if owner := dead_owner(directory):
        return f"killed: {owner}, has ended without a record", True
    if history.last_at is None:
        return "unknown: the journal has no time stamps", False
    age_s = max(0.0, (now - history.last_at).total_seconds())
    if age_s > max(_SILENT_S, _SILENT_STEPS * _recent(history, "seconds", default=0.0)):
        return f"silent for {duration(age_s)}: killed, or in a long operation", True
    return f"running: the last record is {duration(age_s)} old", False


def summary(history: History, directory: Path, now: datetime) -> Iterator[tuple[str, str]]:
    """Yield the lines of the summary, each with its name."""
    last = history.intervals[-1] if history.intervals else {}
    yield "iteration", _progress(history, last)
    if history.consumed:
        yield "consumed", ", ".join(f"{n:,} {name}" for name, n in history.consumed.items())
    if "eta_s" in last and not history.end:
        yield "remaining", f"{duration(last['eta_s'])}, as of iteration {last['iteration']}"
    if len(history.steps.iterations):
        yield "speed", _speed(history)
    yield from _device_lines(last)
    for name, record in {str(r.get("set")): r for r in history.evaluations}.items():
        values = f"loss {number(record.get('lm_loss'))}, perplexity {number(record.get('ppl'))}"
        yield f"{name} set", f"{values}, at iteration {record['iteration']}"
    if history.ranks:
        ranks = history.ranks[-1]
        where = f"rank {ranks.get('slowest')} on {ranks.get('host')}"
        yield "slowest", f"{where}: {number(ranks.get('slowness'))} times the median"
    yield "checkpoint", _newest(directory, history.iteration, now)


def duration(seconds: float | None) -> str:
    """Format a duration."""
    return (
        "?"
        if seconds is None or not math.isfinite(seconds)
        else str(timedelta(seconds=round(seconds)))
    )


def number(value: Any) -> str:
    """Format a number of a record, in which NaN and infinite values are null."""
    return f"{value:.5g}" if isinstance(value, int | float) else "NaN"


def _device_lines(last: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield throughput, memory and energy of the last log interval."""
    if "tflops" in last:
        used = [f"{number(last['tflops'])} TFLOPs a process"]
        used += [
            f"{name} {last[name.lower()]:.1%}" for name in ("MFU", "HFU") if name.lower() in last
        ]
        yield "use", ", ".join(used)
    sizes = ("allocated", "reserved", "resident", "host_available")
    memory = [
        f"{name.replace('_', ' ')} {last[f'{name}_gib']:.2f}"
        for name in sizes
        if f"{name}_gib" in last
    ]
    if memory:
        yield "memory (GiB)", ", ".join(memory)
    if "energy_kwh" in last:
        yield "energy", f"{number(last['energy_kwh'])} kWh, {number(last.get('co2_kg'))} kg of CO2"


def _progress(history: History, last: dict[str, Any]) -> str:
    total = last.get("train_iters")
    if not total:
        return str(history.iteration)
    return f"{history.iteration} of {total} ({history.iteration / total:.1%})"


def _speed(history: History) -> str:
    curves = history.steps.curves
    recent = zip(curves["seconds"][-_RECENT:], curves["tokens_per_second"][-_RECENT:], strict=True)
    steps = [(seconds, seconds * pace) for seconds, pace in recent if math.isfinite(pace)]
    if not steps:
        return "unknown"
    seconds, tokens = map(sum, zip(*steps, strict=True))
    return f"{1000 * seconds / len(steps):.1f} ms a step, {tokens / seconds:,.0f} tokens/s"


def _recent(history: History, curve: str, default: float = math.nan) -> float:
    known = _finite(history.steps.curves[curve][-_RECENT:])
    return mean(known) if known else default


def _newest(directory: Path, iteration: int, now: datetime) -> str:
    for newest in checkpoints_in(directory):
        age = duration(max(0.0, (now - newest.at).total_seconds()))
        return f"iteration {newest.iteration}, {iteration - newest.iteration} back, {age} ago"
    return "none yet"


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


_BARS = "▁▂▃▄▅▆▇█"
_CURVES = {"loss": "loss", "grad_norm": "gradient norm", "learning_rate": "learning rate"}
_STEPS, _BARS_WIDE, _EVENTS = 240, 60, 8
_NAME_WIDE = 14


def view(history: History, directory: Path, now: datetime, *, width: int | None) -> str:
    """Return the terminal view of a run, in lines of at most `width` characters (None: no limit)."""
    return "".join(
        f"{row}\n"
        for line in map(printable, _lines(history, directory, now))
        for row in _rows(line, width)
    )


def _rows(line: str, width: int | None) -> Sequence[str]:
    if width is None or len(line) <= width:
        return [line]
    return wrap(line, max(width, 20), subsequent_indent="    ", break_on_hyphens=False)


def _lines(history: History, directory: Path, now: datetime) -> Iterator[str]:
    state, is_bad = state_of(history, directory, now)
    name = f"run {history.run}, attempt {history.attempt}" if history.starts else "run"
    yield f"{name} | {directory} | {now:%Y-%m-%d %H:%M:%S}"
    yield state
    if is_bad:
        yield NEXT_STEP
    yield ""
    for name, text in summary(history, directory, now):
        yield f"{name:<{_NAME_WIDE}} {text}"
    yield ""
    shown = len(history.steps.iterations[-_STEPS:])
    for curve, name in _CURVES.items():
        values = history.steps.curves[curve][-_STEPS:]
        if any(map(math.isfinite, values)):
            yield f"{name:<{_NAME_WIDE}} {sparkline(values)} {number(values[-1])}"
    if shown:
        yield f"{'':<{_NAME_WIDE}} the last {shown} steps"
    yield ""
    events = events_in(history, directory)
    if len(events) > _EVENTS:
        yield f"{len(events) - _EVENTS} earlier events"
    for event in events[-_EVENTS:]:
        at = f"{event.at:%m-%d %H:%M:%S}" if event.at else " " * 14
        yield f"{at} {event.iteration:>8} {event.kind:<10} {event.text}"


def sparkline(values: Sequence[float], width: int = _BARS_WIDE) -> str:
    """Return a line of bars, each the mean of several values; "x" where all are NaN or infinite.

    >>> sparkline([0.0, 1.0, 2.0, 3.0])
    '▁▃▆█'
    """
    count = min(width, len(values))
    groups = [
        values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)
    ]
    means = [mean(known) if (known := [*filter(math.isfinite, g)]) else math.nan for g in groups]
    known = [value for value in means if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    spread = high - low

    def bar(value: float) -> str:
        if not math.isfinite(value):
            return "x"
        height = (value - low) / spread if spread else 0.0
        return _BARS[min(len(_BARS) - 1, int(height * len(_BARS)))]

    return "".join(map(bar, means))


def printable(text: str) -> str:
    """Return `text` on one line, without control characters."""
    return "".join(c if c.isprintable() else " " for c in text)
