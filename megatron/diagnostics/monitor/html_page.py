"""A run as a page of HTML that needs nothing else: no script, no network, no other file."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from megatron.checkpointing.manifest import published_tags, read_manifest
from megatron.common.atomic_files import replace_text
from megatron.common.errors import CheckpointError, ConfigError
from megatron.diagnostics.monitor.chart import STYLE, Line, chart
from megatron.diagnostics.monitor.history import Event, History, checkpoints_in, events_in
from megatron.diagnostics.monitor.summary import NEXT_STEP, state_of, summary

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
    ("Use of the device (part of its peak)", {"mfu": "MFU", "hfu": "HFU"}),
    ("TFLOPs per process", {"tflops": "TFLOPs"}),
    (
        "Memory, of the rank that takes most (GiB)",
        {"allocated_gib": "allocated", "reserved_gib": "reserved", "resident_gib": "resident"},
    ),
    ("Memory that the fullest host could still give (GiB)", {"host_available_gib": "available"}),
)


def write_page(file: Path, history: History, directory: Path, now: datetime) -> None:
    """Write the page to `file`, whole or not at all.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        replace_text(file, page(history, directory, now))
    except OSError as error:
        raise ConfigError(f"--html {file}: {error.strerror}") from error


def page(history: History, directory: Path, now: datetime) -> str:
    """Return the page of a run. All that comes from its files is escaped."""
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
    """Yield what was asked for and decided, as far as journal and checkpoints tell."""
    start = history.starts[-1] if history.starts else {}
    for title, told in (("Flags", start.get("flags")), ("Runs with", start.get("with"))):
        if isinstance(told, Mapping) and told:
            yield f"<h2>{title}</h2>"
            yield _pairs((name, _text_of(value)) for name, value in told.items())
    try:
        newest = published_tags(directory)[:1]
        plans = [read_manifest(directory / tag).plan for tag in newest]
    except CheckpointError as error:
        yield f'<h2>Plan</h2><p class="bad">{escape(str(error))}</p>'
        return
    for plan in plans:
        yield "<h2>Plan</h2>"
        for part, decided in plan.items():
            text = json.dumps(decided, indent=1, ensure_ascii=False)
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
