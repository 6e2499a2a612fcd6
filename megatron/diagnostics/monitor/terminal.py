"""A run as lines of text."""

import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from statistics import mean
from textwrap import wrap

from megatron.diagnostics.monitor.history import History, events_in
from megatron.diagnostics.monitor.summary import NEXT_STEP, number, state_of, summary

_BARS = "▁▂▃▄▅▆▇█"
_CURVES = {"loss": "loss", "grad_norm": "gradient norm", "learning_rate": "learning rate"}
_STEPS, _BARS_WIDE, _EVENTS = 240, 60, 8
_NAME_WIDE = 14


def view(history: History, directory: Path, now: datetime, *, width: int | None) -> str:
    """Return how the run stands, in lines of at most `width` characters; of any length if None."""
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
        yield f"{len(events) - _EVENTS} events before these"
    for event in events[-_EVENTS:]:
        at = f"{event.at:%m-%d %H:%M:%S}" if event.at else " " * 14
        yield f"{at} {event.iteration:>8} {event.kind:<10} {event.text}"


def sparkline(values: Sequence[float], width: int = _BARS_WIDE) -> str:
    """Return a line of bars, each the mean of as many values; "x" where none is a number.

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
        place = (value - low) / spread if spread else 0.0
        return _BARS[min(len(_BARS) - 1, int(place * len(_BARS)))]

    return "".join(map(bar, means))


def printable(text: str) -> str:
    """Return `text` on one line, without what would steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)
