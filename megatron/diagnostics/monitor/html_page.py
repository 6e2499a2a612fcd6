"""HTML report of a run in one file, without scripts; its charts are SVG figures of matplotlib."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

from megatron.checkpointing.manifest import published_tags, read_manifest
from megatron.common.atomic_files import replace_text
from megatron.common.errors import CheckpointError, ConfigError
from megatron.diagnostics.monitor.history import Event, History, checkpoints_in, events_in
from megatron.diagnostics.monitor.summary import NEXT_STEP, state_of, summary

# Each has a contrast of 3:1 or more to the light and to the dark background.
_COLOURS = ("#3b82f6", "#ea580c", "#16a34a", "#a855f7", "#b7791f", "#0891b2")
_MARK = "#ef4444"
_INK = "#010203"  # replaced by the page's colour of text
_LOG_FROM = 20.0  # largest over smallest value, from which falling curves get a logarithmic axis

STYLE = """
svg { width: 100%; height: auto; color: var(--ink); }
.key { margin-left: 1rem; white-space: nowrap; }
"""
"""CSS for a page with charts, which sets --ink."""


@dataclass(frozen=True)
class Line:
    """One curve of a chart. NaN and infinite values leave gaps."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def chart(
    title: str,
    lines: Sequence[Line],
    *,
    marks: Sequence[tuple[float, str]] = (),
    falls: bool = False,
) -> str:
    """Return an HTML figure with the curves; "" if no line has a finite value.

    Args:
        marks: iterations of events, with their descriptions (tooltips).
        falls: whether the axis is logarithmic if the values fall by a large factor.
    """
    lines = [line for line in lines if any(map(math.isfinite, line.y))]
    if not lines:
        return ""
    values = [y for line in lines for y in line.y if math.isfinite(y)]
    is_log = falls and min(values) > 0 and max(values) / min(values) >= _LOG_FROM
    iterations = [x for line in lines for x in line.x]
    marks = [mark for mark in marks if min(iterations) <= mark[0] <= max(iterations)]
    salt = sha256(title.encode()).hexdigest()[:8]  # unique ids among the figures of a page
    svg = _draw(lines, [iteration for iteration, _ in marks], salt, is_log=is_log)
    for index, (_, text) in enumerate(marks):
        group = f'<g id="mark-{index}-{salt}">'
        svg = svg.replace(group, f"{group}<title>{escape(text)}</title>")
    title = f"{escape(title)}{', logarithmic' if is_log else ''}"
    # Above the picture, where names of any length cover no curve.
    keys = [
        f'<span class="key" style="color: {_COLOURS[i % len(_COLOURS)]}">{escape(line.name)}</span>'
        for i, line in enumerate(lines)
    ]
    caption = f"{title}{' '.join(keys) if len(lines) > 1 else ''}"
    return f"<figure><figcaption>{caption}</figcaption>{svg}</figure>"


def _draw(lines: Sequence[Line], marks: Sequence[float], salt: str, *, is_log: bool) -> str:
    """Draw the curves as an SVG element; its text stays text."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "path.simplify_threshold": 0.5}):
        figure = Figure(figsize=(10, 3.2), layout="constrained")
        axes = figure.add_subplot()
        for index, line in enumerate(lines):
            colour = _COLOURS[index % len(_COLOURS)]
            ys = [y if math.isfinite(y) else math.nan for y in line.y]
            axes.plot(line.x, ys, color=colour, gid=f"curve-{index}-{salt}")
            if alone := _isolated(ys):
                axes.plot([line.x[i] for i in alone], [ys[i] for i in alone], ".", color=colour)
        for index, iteration in enumerate(marks):
            axes.axvline(iteration, color=_MARK, lw=1, ls="--", gid=f"mark-{index}-{salt}")
        if is_log:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
            axes.yaxis.set_minor_locator(NullLocator())
        axes.locator_params(axis="x", integer=True)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.8g}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.4g}")
        axes.grid(axis="y", color="#888888", alpha=0.3)
        axes.tick_params(colors=_INK)
        axes.set_frame_on(False)
        text = StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=metadata)
    svg = text.getvalue()
    return svg[svg.index("<svg") :].replace(_INK, "currentColor")


def _isolated(ys: Sequence[float]) -> list[int]:
    """Return the indices of finite values between gaps, which no segment of a curve shows."""
    padded = [math.nan, *ys, math.nan]
    return [
        i
        for i, (before, y, after) in enumerate(zip(padded, ys, padded[2:], strict=False))
        if math.isfinite(y) and math.isnan(before) and math.isnan(after)
    ]


_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --back: #fff; --faint: #8884; --bad: #b91c1c; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --back: #16181c; --bad: #f87171; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back);
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.bad { color: var(--bad); }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0;
  border-bottom: 1px solid var(--faint); overflow-wrap: anywhere; }
th { white-space: nowrap; font-weight: 600; }
figure { margin: 0 0 1rem; } figcaption { font-weight: 600; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

_CURVES = (
    ("loss", "Loss"),
    ("grad_norm", "Gradient norm"),
    ("learning_rate", "Learning rate"),
    ("tokens_per_second", "Tokens per second"),
    ("seconds", "Seconds per step"),
)
_OF_INTERVALS = (
    ("Utilization of the device (fraction of its peak)", {"mfu": "MFU", "hfu": "HFU"}),
    ("TFLOPs per process", {"tflops": "TFLOPs"}),
    (
        "Memory of the rank that uses most (GiB)",
        {"allocated_gib": "allocated", "reserved_gib": "reserved", "resident_gib": "resident"},
    ),
    ("Available memory of the host with the least (GiB)", {"host_available_gib": "available"}),
)


def write_page(file: Path, history: History, directory: Path, now: datetime) -> None:
    """Write the page to `file` atomically.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        replace_text(file, page(history, directory, now))
    except OSError as error:
        raise ConfigError(f"--html {file}: {error.strerror}") from error


def page(history: History, directory: Path, now: datetime) -> str:
    """Return the page of a run. All text from its files is escaped."""
    name = f"Run {history.run}"
    state, is_bad = state_of(history, directory, now)
    events = events_in(history, directory)
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"/>',
        '<meta name="viewport" content="width=device-width"/>',
        f"<title>{escape(name)}</title><style>{_STYLE}{STYLE}</style></head><body>",
        f"<h1>{escape(name)}</h1>",
        f"<p{_class(is_bad)}>{escape(state)}</p>",
        f"<p>{escape(NEXT_STEP)}</p>" if is_bad else "",
        f"<p>{escape(str(directory))}, as of {now:%Y-%m-%d %H:%M:%S %z}</p>",
        _pairs(summary(history, directory, now)),
        *_charts(history, events),
        "<h2>Events</h2>",
        _events(events),
        "<h2>Checkpoints</h2>",
        _table(
            ("iteration", "written"),
            ((str(c.iteration), f"{c.at:%Y-%m-%d %H:%M:%S}") for c in checkpoints_in(directory)),
        ),
        *_settings(history, directory),
        "</body></html>\n",
    ]
    return "\n".join(filter(None, parts))


def _charts(history: History, events: Sequence[Event]) -> Iterator[str]:
    marks = [
        (event.iteration, f"{event.kind}: {event.text}")
        for event in events
        if event.kind in ("start", "rollback", "failure") and event.iteration
    ]
    steps = history.steps
    for curve, title in _CURVES:
        if curve == "grad_norm":
            yield chart("Validation loss", _validation(history), marks=marks, falls=True)
        line = Line(title, steps.iterations, steps.curves[curve])
        yield chart(title, [line], marks=marks, falls=curve in ("loss", "grad_norm"))
    for title, names in _OF_INTERVALS:
        lines = [_of(history.intervals, key, name) for key, name in names.items()]
        yield chart(title, lines, marks=marks)
    if history.ranks:
        title = "The slowest rank's time over the median"
        yield chart(title, [_of(history.ranks, "slowness", title)], marks=marks)


def _validation(history: History) -> list[Line]:
    sets: dict[str, list[dict[str, Any]]] = {}
    for record in history.evaluations:
        sets.setdefault(str(record.get("set")), []).append(record)
    return [_of(records, "lm_loss", name) for name, records in sets.items()]


def _of(records: Iterable[Mapping[str, Any]], key: str, name: str) -> Line:
    known = [(r["iteration"], r[key]) for r in records if isinstance(r.get(key), int | float)]
    return Line(name, [x for x, _ in known], [y for _, y in known])


def _events(events: Sequence[Event]) -> str:
    rows = (
        f"<tr{_class(event.is_bad)}>"
        + "".join(
            f"<td>{escape(text)}</td>"
            for text in (
                f"{event.at:%Y-%m-%d %H:%M:%S}" if event.at else "",
                str(event.iteration),
                event.kind,
                event.text,
            )
        )
        + "</tr>"
        for event in events
    )
    heads = "".join(f"<th>{name}</th>" for name in ("when", "iteration", "what", ""))
    return f'<table id="events"><tr>{heads}</tr>{"".join(rows)}</table>'


def _settings(history: History, directory: Path) -> Iterator[str]:
    """Yield flags, software and plan, as recorded in journal and checkpoints."""
    start = history.starts[-1] if history.starts else {}
    for title, values in (("Flags", start.get("flags")), ("Runs with", start.get("with"))):
        if isinstance(values, Mapping) and values:
            yield f"<h2>{title}</h2>"
            yield _pairs((name, _text_of(value)) for name, value in values.items())
    try:
        newest = published_tags(directory)[:1]
        plans = [read_manifest(directory / tag).plan for tag in newest]
    except CheckpointError as error:
        yield f'<h2>Plan</h2><p class="bad">{escape(str(error))}</p>'
        return
    for plan in plans:
        yield "<h2>Plan</h2>"
        for part, section in plan.items():
            text = json.dumps(section, indent=1, ensure_ascii=False)
            yield f"<details><summary>{escape(part)}</summary><pre>{escape(text)}</pre></details>"


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    rows = (f"<tr><th>{escape(a)}</th><td>{escape(b)}</td></tr>" for a, b in pairs)
    return f"<table>{''.join(rows)}</table>"


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    heads = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<table><tr>{heads}</tr>{body}</table>"


def _class(is_bad: bool) -> str:
    return ' class="bad"' if is_bad else ""


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
