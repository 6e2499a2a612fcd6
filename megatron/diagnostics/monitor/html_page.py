"""HTML report of a run, or comparison of several, in one file without scripts."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from megatron.checkpointing.manifest import published_tags, read_manifest
from megatron.common.atomic_files import replace_text
from megatron.common.errors import CheckpointError, ConfigError
from megatron.common.web_page import web_page
from megatron.diagnostics.monitor import charts
from megatron.diagnostics.monitor.charts import Line, Mark, chart, colour_of
from megatron.diagnostics.monitor.history import Event, History, checkpoints_in, events_in
from megatron.diagnostics.monitor.summary import NEXT_STEP, number, state_of, summary

_STYLE = f"""{charts.STYLE}
table {{ border-collapse: collapse; }}
th, td {{ text-align: left; vertical-align: top; padding: .25rem .9rem .25rem 0;
  border-bottom: 1px solid var(--rule); }}
th {{ font-weight: 600; overflow-wrap: break-word; }} td {{ min-width: 7.5rem; }}
.table {{ overflow-x: auto; }}
pre {{ white-space: pre-wrap; }}
summary {{ cursor: pointer; }}
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
_MARKED = ("start", "rollback", "step", "failure")
_Values = tuple[Sequence[float], Sequence[float]]  # iterations, and the value at each
_EVENTS = 500  # in the table: of a run with more, the last ones


@dataclass(frozen=True)
class ReportedRun:
    """A run to report on, and the directory that it saves to."""

    directory: Path
    history: History


def write_page(file: Path, runs: Sequence[ReportedRun], now: datetime) -> None:
    """Write the page to `file` atomically.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        replace_text(file, page(runs, now))
    except OSError as error:
        raise ConfigError(f"--html {file}: {error.strerror}") from error


def page(runs: Sequence[ReportedRun], now: datetime) -> str:
    """Return the page of one run, or of several. All text from their files is escaped."""
    named = _runs_by_name(runs)
    events = {name: events_in(run.history, run.directory) for name, run in named.items()}
    names = ", ".join(named)
    parts = [
        *_head(named, now),
        *_charts(named, events),
        *(_events(name if len(runs) > 1 else "", events[name]) for name in named),
        *_settings(named),
        *(_details(runs[0].directory) if len(runs) == 1 else ()),
    ]
    title = f"Run {names}" if len(runs) == 1 else f"Comparison of {names}"
    return web_page(title, "\n".join(filter(None, parts)), style=_STYLE, policy=_POLICY)


def _runs_by_name(runs: Sequence[ReportedRun]) -> dict[str, ReportedRun]:
    """Return runs by name: of several, the folders, with their paths where these are equal."""
    if len(runs) == 1:
        return {runs[0].history.run: runs[0]}
    counts = Counter(run.directory.name for run in runs)
    return {
        run.directory.name if counts[run.directory.name] == 1 else str(run.directory): run
        for run in runs
    }


def _head(named: Mapping[str, ReportedRun], now: datetime) -> Iterator[str]:
    """Yield the state of each run, and the summary."""
    columns, is_bad = [], False
    for run in named.values():
        state, needs_attention = state_of(run.history, run.directory, now)
        is_bad |= needs_attention
        columns.append({"state": state, **dict(_losses(run.history))})
        columns[-1] |= dict(summary(run.history, run.directory, now))
        columns[-1]["directory"] = str(run.directory)
        if len(named) == 1:
            yield f"<p{_class(needs_attention)}>{escape(columns[-1].pop('state'))}</p>"
    if is_bad:
        yield f"<p>{escape(NEXT_STEP)}</p>"
    yield f'<p class="faint">As of {now:%Y-%m-%d %H:%M:%S %z}</p>'
    yield _columns([*named], columns)


def _losses(history: History) -> Iterator[tuple[str, str]]:
    """Yield the last loss and the lowest one."""
    curve = history.steps.curves["loss"]
    known = [
        (loss, int(i))
        for i, loss in zip(history.steps.iterations, curve, strict=True)
        if math.isfinite(loss)
    ]
    if known:
        low, at = min(known)
        yield "loss", f"{number(known[-1][0])}, lowest {number(low)} at iteration {at}"


def _columns(names: Sequence[str], columns: Sequence[Mapping[str, str]]) -> str:
    """Return a table with a row for each key, and a column for each run."""
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [(key, *(column.get(key, "") for column in columns)) for key in keys]
    return _table(("", *names) if len(names) > 1 else (), ((row, False) for row in rows))


def _charts(
    named: Mapping[str, ReportedRun], events: Mapping[str, Sequence[Event]]
) -> Iterator[str]:
    is_one = len(named) == 1
    marks = [
        Mark(
            event.iteration,
            f"{event.kind}: {event.text}" if is_one else f"{name}, {event.kind}: {event.text}",
            ("var(--bad)" if event.is_bad else "var(--edge)") if is_one else colour_of(index),
        )
        for index, (name, found) in enumerate(events.items())
        for event in found
        if event.kind in _MARKED and event.iteration
    ]
    saves = [c.iteration for run in named.values() for c in checkpoints_in(run.directory)]
    yield "<h2>Curves</h2>"
    yield (
        '<p class="faint">Dashed lines: starts, skipped steps, rollbacks and failures; dots: '
        "checkpoints. Of long runs a line is the mean, in a band from lowest to highest value.</p>"
    )
    histories = {name: run.history for name, run in named.items()}
    drawn = [*_lines(histories)]
    known = [x for _, lines, _ in drawn for line in lines for x in (*line.x[:1], *line.x[-1:])]
    span = min(known, default=0.0), max(known, default=0.0)
    figures = (
        chart(title, lines, iterations=span, marks=marks, saves=saves, falls=falls)
        for title, lines, falls in drawn
    )
    yield f'<div class="charts">{"".join(figures)}</div>'


def _lines(histories: Mapping[str, History]) -> Iterator[tuple[str, list[Line], bool]]:
    """Yield title and lines of each chart, and whether its values fall.

    A chart of one run has a line for each series, a chart of several runs a line for each run.
    """
    for title, series, falls in _series([*histories.values()]):
        if len(histories) == 1:
            yield title, [Line(name, *values) for name, (values,) in series.items()], falls
            continue
        for name, of_runs in series.items():
            lines = [Line(run, *values) for run, values in zip(histories, of_runs, strict=True)]
            yield title if len(series) == 1 else f"{title}: {name}", lines, falls


def _series(
    histories: Sequence[History],
) -> Iterator[tuple[str, dict[str, list[_Values]], bool]]:
    """Yield title, values of each run by the name of the series, and whether they fall."""
    for curve, title in _CURVES:
        if curve == "grad_norm":
            sets = dict.fromkeys(str(r.get("set")) for h in histories for r in h.evaluations)
            losses = {name: [_validation(h, name) for h in histories] for name in sets}
            yield "Validation loss", losses, True
        steps = [(h.steps.iterations, h.steps.curves[curve]) for h in histories]
        yield title, {title: [*steps]}, curve in ("loss", "grad_norm")
    for title, names in _OF_INTERVALS:
        series = {name: [_of(h.intervals, key) for h in histories] for key, name in names.items()}
        yield title, series, False
    title = "The slowest rank's time over the median"
    yield title, {title: [_of(h.ranks, "slowness") for h in histories]}, False


def _validation(history: History, name: str) -> _Values:
    return _of((r for r in history.evaluations if str(r.get("set")) == name), "lm_loss")


def _of(records: Iterable[Mapping[str, Any]], key: str) -> _Values:
    known = [(r["iteration"], r[key]) for r in records if isinstance(r.get(key), int | float)]
    return [x for x, _ in known], [y for _, y in known]


def _events(name: str, events: Sequence[Event]) -> str:
    rows = (
        (
            (
                f"{event.at:%Y-%m-%d %H:%M:%S}" if event.at else "",
                str(event.iteration),
                event.kind,
                event.text,
            ),
            event.is_bad,
        )
        for event in events[-_EVENTS:]
    )
    earlier = len(events) - _EVENTS
    return (
        f"<h2>Events{escape(f' of {name}' if name else '')}</h2>"
        + (f"<p>{earlier} earlier events are in the journal.</p>" if earlier > 0 else "")
        + _table(("when", "iteration", "what", ""), rows, identity="" if name else "events")
    )


def _settings(named: Mapping[str, ReportedRun]) -> Iterator[str]:
    """Yield flags and software of the last starts; of several runs, those that differ."""
    starts = [run.history.starts[-1:] or [{}] for run in named.values()]
    for title, key in (("Flags", "flags"), ("Runs with", "with")):
        found = [start.get(key) for (start,) in starts]
        columns = [
            {name: _text_of(value) for name, value in values.items()}
            if isinstance(values, Mapping)
            else {}
            for values in found
        ]
        if len(named) > 1:
            keys = dict.fromkeys(key for column in columns for key in column)
            differ = [key for key in keys if len({column.get(key) for column in columns}) > 1]
            columns = [{key: column.get(key, "not set") for key in differ} for column in columns]
            title += ": differences"
        if any(columns):
            yield f"<h2>{title}</h2>"
            yield _columns([*named], columns)


def _details(directory: Path) -> Iterator[str]:
    """Yield the checkpoints, and the plan of the newest one."""
    yield "<h2>Checkpoints</h2>"
    written = [(c.iteration, f"{c.at:%Y-%m-%d %H:%M:%S}") for c in checkpoints_in(directory)]
    yield _table(("iteration", "written"), (((str(i), at), False) for i, at in written))
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


def _table(
    heads: Sequence[str], rows: Iterable[tuple[Sequence[str], bool]], *, identity: str = ""
) -> str:
    """Return a table of rows of cells, each with whether it needs attention; scrolls if wide."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "".join(
        f'<tr{_class(is_bad)}><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for (first, *cells), is_bad in rows
    )
    named = f' id="{identity}"' if identity else ""
    rows_of_heads = f"<tr>{head}</tr>" if head else ""
    return (
        '<div class="table" tabindex="0" role="region" aria-label="Table">'
        f"<table{named}>{rows_of_heads}{body}</table></div>"
    )


def _class(is_bad: bool) -> str:
    return ' class="bad"' if is_bad else ""


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
