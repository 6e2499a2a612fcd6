"""Curves over iterations as an SVG figure of an HTML page, drawn by matplotlib."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from io import StringIO

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
    """Return an HTML figure with the curves; "" where no line has a finite value.

    Args:
        marks: iterations at which something happened, and its description (a tooltip).
        falls: whether the values are expected to fall by a large factor; the axis is logarithmic
            then, if they do.
    """
    lines = [line for line in lines if any(map(math.isfinite, line.y))]
    if not lines:
        return ""
    values = [y for line in lines for y in line.y if math.isfinite(y)]
    is_log = falls and min(values) > 0 and max(values) / min(values) >= _LOG_FROM
    iterations = [x for line in lines for x in line.x]
    marks = [mark for mark in marks if min(iterations) <= mark[0] <= max(iterations)]
    salt = sha256(title.encode()).hexdigest()[:8]  # no id is that of another figure of the page
    svg = _drawn(lines, [iteration for iteration, _ in marks], salt, is_log=is_log)
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


def _drawn(lines: Sequence[Line], marks: Sequence[float], salt: str, *, is_log: bool) -> str:
    """Return the curves as an SVG element, its text as text."""
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
