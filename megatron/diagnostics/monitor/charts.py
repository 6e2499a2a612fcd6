"""Charts of a run as SVG: any number of steps as a few hundred points, legible at any width."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_BINS = 500
"""Horizontal positions of a chart: more values than these are drawn as means in a band."""

_LOG_FROM = 20.0  # largest over smallest value, from which falling curves get a logarithmic axis
_SIZE = 1000  # of the coordinates, which are stretched to the width and the height of the chart
_COLOURS = 6  # --curve-0 to --curve-5 of web_page.css
_TICKS = 6  # of an axis, at most
_ROWS = 10  # of the table of values
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))

STYLE = """
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); }
figure { margin: 1rem 1rem 1.6rem 3.5rem; min-width: 0; }
figcaption { margin: 0 0 .5rem -3.5rem; font-weight: 600; }
figure details { margin: 1.6rem 0 0 -3.5rem; }
.key { display: inline-block; margin-left: 1rem; } .key::before { content: "━ "; }
.chart { display: block; width: 100%; height: 13rem; overflow: visible; }
.chart text { fill: var(--faint); font-size: .8rem; }
.chart line { stroke: var(--rule); }
.chart path { fill: none; stroke: currentColor; stroke-width: 1.6; stroke-linejoin: round;
  stroke-linecap: round; vector-effect: non-scaling-stroke; }
.chart .dots { stroke-width: 5; }
.chart .band { fill: currentColor; opacity: .35; stroke: none; }
.chart .mark line { stroke: currentColor; stroke-dasharray: 4 3; }
.chart .mark .target { stroke: transparent; stroke-width: 11; stroke-dasharray: none; }
.chart circle { fill: var(--faint); }
"""
"""CSS of charts, with the colours of web_page.css."""


@dataclass(frozen=True)
class Line:
    """One curve of a chart, with increasing `x`. NaN and infinite values leave gaps."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Mark:
    """Event at an iteration.

    Args:
        colour: CSS colour.
    """

    iteration: float
    text: str
    colour: str


def colour_of(index: int) -> str:
    """Return the CSS colour of a chart's line."""
    return f"var(--curve-{index % _COLOURS})"


def chart(
    title: str,
    lines: Sequence[Line],
    *,
    iterations: tuple[float, float],
    marks: Sequence[Mark] = (),
    saves: Sequence[float] = (),
    falls: bool = False,
) -> str:
    """Return an HTML figure with the curves and their values; "" if no value is finite.

    Args:
        iterations: first and last one of the horizontal axis.
        marks: vertical lines.
        saves: iterations of checkpoints, dots on the axis.
        falls: whether the axis is logarithmic if the values fall by a large factor.
    """
    known = {i: line for i, line in enumerate(lines) if np.isfinite(line.y).any()}
    if not known:
        return ""
    values = np.concatenate([np.asarray(line.y, float) for line in known.values()])
    low, high = values[np.isfinite(values)].min(), values[np.isfinite(values)].max()
    is_log = bool(falls and low > 0 and high / low >= _LOG_FROM)
    across = _Axis.around(*iterations, margin=0)
    up = _Axis.around(low, high, margin=0.05, is_log=is_log)
    drawn = "".join(_curve(line, across, up, colour_of(i)) for i, line in known.items())
    parts = [
        *_grid(across, up),
        f'<svg viewBox="0 0 {_SIZE} {_SIZE}" preserveAspectRatio="none" width="100%" height="100%"'
        f' overflow="visible">{drawn}</svg>',
        *_marks(marks, saves, across),
    ]
    title = f"{escape(title)}{', logarithmic' if is_log else ''}"
    keys = [
        f' <span class="key" style="color: {colour_of(i)}">{escape(line.name)}</span>'
        for i, line in known.items()
    ]
    described = escape("; ".join(_description(line) for line in known.values()))
    return (
        f"<figure><figcaption>{title}{''.join(keys) if len(lines) > 1 else ''}</figcaption>"
        f'<svg class="chart" role="img" aria-label="{described}">{"".join(parts)}</svg>'
        f"<details><summary>Values</summary>{_values([*known.values()], across)}</details></figure>"
    )


@dataclass(frozen=True)
class _Axis:
    """An axis from `low` to `high`, which are logarithms of the values if `is_log`."""

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def around(cls, low: float, high: float, *, margin: float, is_log: bool = False) -> "_Axis":
        """Return the axis of the values from `low` to `high`, with a share of `margin` around."""
        if is_log:
            low, high = math.log10(low), math.log10(high)
        margin = margin * (high - low) if high > low else abs(high) / 20 or 0.5
        return cls(low - margin, high + margin, is_log)

    def shares(self, values: Sequence[float] | NDArray) -> NDArray:
        """Return the positions of values, from 0 to 1."""
        found = np.asarray(values, float)
        return ((np.log10(found) if self.is_log else found) - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return the round values to label."""
        if not self.is_log:
            return _round_values(self.low, self.high)
        powers = range(math.floor(self.low), math.ceil(self.high) + 1)
        found: list[float] = []
        for factors in ((1, 2, 5), (1,)):
            found = [f * 10.0**p for p in powers for f in factors]
            found = [v for v in found if self.low <= math.log10(v) <= self.high]
            if len(found) <= 2 * _TICKS:
                return found
        return found[:: len(found) // _TICKS]


def _round_values(low: float, high: float) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten, at most `_TICKS` intervals."""
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    # Rounded: multiples of 0.1 are otherwise 0.30000000000000004 and so on.
    digits = max(0, -math.floor(math.log10(step)))
    return [
        round(i * step, digits) for i in range(math.ceil(low / step), math.floor(high / step) + 1)
    ]


def _label(value: float) -> str:
    """Format a round value.

    >>> _label(12000), _label(0.0003), _label(2.5)
    ('12k', '0.0003', '2.5')
    """
    for size, prefix in _PREFIXES:
        if abs(value) >= size:
            return f"{value / size:.5g}{prefix}"
    return f"{value:.5g}"


def _grid(across: _Axis, up: _Axis) -> Iterator[str]:
    ticks = up.ticks()
    for value, share in zip(ticks, up.shares(ticks), strict=True):
        y = f"{100 * (1 - share):.4g}%"
        yield f'<line x1="0" x2="100%" y1="{y}" y2="{y}"/>'
        yield f'<text x="-8" y="{y}" dy=".35em" text-anchor="end">{_label(value)}</text>'
    whole = [x for x in across.ticks() if x == int(x)]
    for value, share in zip(whole, across.shares(whole), strict=True):
        place = f'x="{100 * share:.4g}%" y="100%" dy="1.5em"'
        yield f'<text {place} text-anchor="middle">{_label(value)}</text>'


@dataclass(frozen=True)
class _Bins:
    """Values of a line by horizontal position: arrays of equal length; NaN: no finite value."""

    x: NDArray
    first: NDArray
    mean: NDArray
    low: NDArray
    high: NDArray

    @classmethod
    def of(cls, line: Line, across: _Axis, count: int) -> "_Bins":
        """Return the line in `count` bins, of which only those with values are kept."""
        x, y = np.asarray(line.x, float), np.asarray(line.y, float)
        y = np.where(np.isfinite(y), y, np.nan)
        bins = np.minimum((across.shares(line.x) * count).astype(int), count - 1)
        starts = np.flatnonzero(np.diff(bins, prepend=-1))
        ends = np.append(starts[1:], len(x))
        is_finite = np.isfinite(y)
        counts = np.add.reduceat(is_finite.astype(int), starts)
        sums = np.add.reduceat(np.where(is_finite, y, 0.0), starts)
        return cls(
            x=np.add.reduceat(x, starts) / (ends - starts),
            first=x[starts],
            mean=np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0),
            low=np.fmin.reduceat(y, starts),
            high=np.fmax.reduceat(y, starts),
        )


def _curve(line: Line, across: _Axis, up: _Axis, colour: str) -> str:
    """Return a line as a path; with more values than positions, a path of means in a band."""
    paths = {}
    if len(line.x) <= _BINS:
        x, values = across.shares(line.x), np.where(np.isfinite(line.y), line.y, np.nan)
    else:
        bins = _Bins.of(line, across, _BINS)
        x, values = across.shares(bins.x), bins.mean
        paths["band"] = _band(x, up.shares(bins.low), up.shares(bins.high))
    y = up.shares(values)
    paths |= {"curve": _path(x, y), "dots": _dots(x, y)}
    drawn = (f'<path class="{name}" d="{data}"/>' for name, data in paths.items() if data)
    return f'<g style="color: {colour}">{"".join(drawn)}</g>'


def _runs(values: NDArray) -> Iterator[slice]:
    """Yield the ranges of consecutive finite values."""
    edges = np.flatnonzero(np.diff(np.isfinite(values), prepend=False, append=False))
    for first, end in zip(edges[::2], edges[1::2], strict=True):
        yield slice(int(first), int(end))


def _points(x: NDArray, y: NDArray) -> str:
    at = zip(_SIZE * x, _SIZE * (1 - y), strict=True)
    return "L".join(f"{across:.1f} {down:.1f}" for across, down in at)


def _path(x: NDArray, y: NDArray) -> str:
    """Return the data of a path."""
    return "".join(f"M{_points(x[run], y[run])}" for run in _runs(y))


def _dots(x: NDArray, y: NDArray) -> str:
    """Return the data of a path of the values between gaps: dots, by their round line caps."""
    alone = [run for run in _runs(y) if run.stop - run.start == 1]
    return "".join(f"M{_points(x[run], y[run])}h0" for run in alone)


def _band(x: NDArray, low: NDArray, high: NDArray) -> str:
    """Return the data of a path around the area between two curves."""
    return "".join(
        f"M{_points(x[run], high[run])}L{_points(x[run][::-1], low[run][::-1])}z"
        for run in _runs(high)
    )


def _marks(marks: Sequence[Mark], saves: Sequence[float], across: _Axis) -> Iterator[str]:
    """Yield marks and dots; those at one horizontal position are drawn once."""
    at: dict[int, list[Mark]] = {}
    for mark in marks:
        if across.low <= mark.iteration <= across.high:
            at.setdefault(_position(mark.iteration, across), []).append(mark)
    for position, found in at.items():
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        x = f"{100 * position / _BINS:g}%"
        line = f'x1="{x}" x2="{x}" y1="0" y2="100%"'
        yield f'<g class="mark" style="color: {found[-1].colour}">'
        yield f"<title>{escape(found[-1].text + more)}</title>"
        yield f'<line {line}/><line class="target" {line}/></g>'
    positions = {_position(x, across) for x in saves if across.low <= x <= across.high}
    for position in sorted(positions):
        yield f'<circle cx="{100 * position / _BINS:g}%" cy="100%" r="3.5"/>'


def _position(iteration: float, across: _Axis) -> int:
    return round(float(across.shares([iteration])[0]) * _BINS)


def _description(line: Line) -> str:
    """Describe a curve in words: first, last, lowest and highest finite value."""
    y = np.asarray(line.y, float)
    known = np.flatnonzero(np.isfinite(y))
    low, high = known[y[known].argmin()], known[y[known].argmax()]

    def at(index: int) -> str:
        return f"{y[index]:.4g} at iteration {line.x[index]:.10g}"

    return (
        f"{line.name}: from {at(known[0])} to {at(known[-1])}; lowest {at(low)}; highest {at(high)}"
    )


def _values(lines: Sequence[Line], across: _Axis) -> str:
    """Return a table of the curves: mean, lowest and highest values of ranges of iterations."""
    edges = np.linspace(across.low, across.high, _ROWS + 1)
    columns = []
    for line in lines:
        bins = _Bins.of(line, across, _ROWS)
        rows = np.minimum((across.shares(bins.first) * _ROWS).astype(int), _ROWS - 1)
        cells = [
            f"{m:.4g} ({a:.4g} to {b:.4g})"
            for m, a, b in zip(bins.mean, bins.low, bins.high, strict=True)
        ]
        columns.append(dict(zip(rows.tolist(), cells, strict=True)))
    heads = "".join(f'<th scope="col">{escape(line.name)}</th>' for line in lines)
    body = "".join(
        f'<tr><th scope="row">{math.ceil(first)} to {math.floor(last)}</th>'
        + "".join(f"<td>{column.get(row, '')}</td>" for column in columns)
        + "</tr>"
        for row, (first, last) in enumerate(pairwise(edges))
        if any(row in column for column in columns)
    )
    return (
        '<div class="table" tabindex="0" role="region" aria-label="Values"><table>'
        f'<tr><th scope="col">iterations</th>{heads}</tr>{body}</table></div>'
    )
