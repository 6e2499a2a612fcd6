"""Curves over iterations as an SVG picture that stands in a page."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

_WIDE, _HIGH = 720, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 44, 12, 28  # right: half of the widest label
_ON_LIGHT = ("#1f5fbf", "#c2410c", "#15803d", "#7e22ce", "#a16207", "#0e7490")
_ON_DARK = ("#7db2ff", "#ff9a5c", "#5fd38a", "#cf9bff", "#e8c15a", "#4fd0e6")


def _palette(colours: Sequence[str]) -> str:
    return "".join(f".curve{i} {{ --curve: {colour}; }} " for i, colour in enumerate(colours))


STYLE = f"""
{_palette(_ON_LIGHT)}
@media (prefers-color-scheme: dark) {{ {_palette(_ON_DARK)} }}
svg {{ width: 100%; height: auto; }} svg text {{ font-size: 12px; fill: var(--ink); }}
.grid {{ stroke: var(--faint); }} .mark {{ stroke: var(--bad); stroke-dasharray: 3 3; }}
polyline {{ fill: none; stroke: var(--curve); stroke-width: 1.5; }}
circle {{ fill: var(--curve); }}
.key {{ color: var(--curve); margin-left: 1rem; white-space: nowrap; }}
"""
"""Rules for a page with charts, which sets --ink, --faint and --bad."""
_LOG_FROM = 20.0
"""Largest over smallest value, from which curves that fall have a logarithmic axis."""

_TICKS = 5


@dataclass(frozen=True)
class Line:
    """One curve of a chart. A value that is no number leaves a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class _Scale:
    """Where a value is drawn."""

    low: float
    high: float
    begin: float  # the place of `low`
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return the place of `value`."""
        low, high, value = (
            (math.log10(v) for v in (self.low, self.high, value))
            if self.is_log
            else (self.low, self.high, value)
        )
        return self.begin + (value - low) / (high - low) * (self.end - self.begin)


def chart(
    title: str,
    lines: Sequence[Line],
    *,
    marks: Sequence[tuple[float, str]] = (),
    falls: bool = False,
) -> str:
    """Return a figure; an empty text where no line has a value.

    Args:
        marks: places on the axis of iterations at which something happened, and what.
        falls: whether the values are expected to fall by a large factor; the axis is logarithmic
            then, if they do.
    """
    lines = [line for line in lines if any(map(math.isfinite, line.y))]
    if not lines:
        return ""
    x_scale, y_scale = _scales(lines, falls=falls)
    title = f"{escape(title)}{', logarithmic' if y_scale.is_log else ''}"
    # Above the picture, where names of any length cover no curve.
    keys = [
        f'<span class="key curve{i % len(_ON_LIGHT)}">{escape(line.name)}</span>'
        for i, line in enumerate(lines)
    ]
    parts = [
        f"<figure><figcaption>{title}{' '.join(keys) if len(lines) > 1 else ''}</figcaption>",
        f'<svg viewBox="0 0 {_WIDE} {_HIGH}" role="img" xmlns="http://www.w3.org/2000/svg">',
        f"<title>{title}</title>",
        *_grid(x_scale, y_scale),
        *_marks(marks, x_scale),
    ]
    for index, line in enumerate(lines):
        parts += _curve(line, f"curve{index % len(_ON_LIGHT)}", x_scale, y_scale)
    return "".join([*parts, "</svg></figure>"])


def thinned(line: Line, most: int) -> Line:
    """Return a line of about `most` points: of each stretch the lowest and the highest value.

    What is no number is left out of stretches that have a number.
    """
    count = len(line.x)
    if count <= most:
        return line
    stretches = most // 2
    kept: list[int] = []
    for i in range(stretches):
        places = range(i * count // stretches, (i + 1) * count // stretches)
        known = [p for p in places if math.isfinite(line.y[p])] or [places[0]]
        kept += sorted({min(known, key=line.y.__getitem__), max(known, key=line.y.__getitem__)})
    return Line(line.name, [line.x[p] for p in kept], [line.y[p] for p in kept])


def _scales(lines: Sequence[Line], *, falls: bool) -> tuple[_Scale, _Scale]:
    xs = [x for line in lines for x in line.x]
    ys = [y for line in lines for y in line.y if math.isfinite(y)]
    low, high = min(ys), max(ys)
    is_log = falls and low > 0 and high / low >= _LOG_FROM
    if low == high:
        low, high = low - (abs(low) or 1.0) / 10, high + (abs(high) or 1.0) / 10
    first, last = min(xs), max(xs)
    return (
        _Scale(first, last if last > first else first + 1, _LEFT, _WIDE - _RIGHT),
        _Scale(low, high, _HIGH - _BOTTOM, _TOP, is_log),
    )


def _grid(x_scale: _Scale, y_scale: _Scale) -> Iterator[str]:
    for value in _ticks(y_scale):
        y = y_scale.place(value)
        yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDE - _RIGHT}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>'
    for value in _ticks(x_scale):
        x = x_scale.place(value)
        yield f'<text x="{x:.1f}" y="{_HIGH - 8}" text-anchor="middle">{value:.8g}</text>'


def _ticks(scale: _Scale) -> list[float]:
    """Return round values between the ends of a scale."""
    if scale.is_log:
        low, high = math.log10(scale.low), math.log10(scale.high)
        steps = [10 ** (low + (high - low) * i / (_TICKS - 1)) for i in range(_TICKS)]
        return [float(f"{value:.2g}") for value in steps[1:-1]]
    size = 10 ** math.floor(math.log10((scale.high - scale.low) / _TICKS))
    step = next(s * size for s in (1, 2, 5, 10) if (scale.high - scale.low) / (s * size) <= _TICKS)
    first, last = math.ceil(scale.low / step), math.floor(scale.high / step)
    return [place * step for place in range(first, last + 1)]


def _marks(marks: Sequence[tuple[float, str]], x_scale: _Scale) -> Iterator[str]:
    for iteration, text in marks:
        if x_scale.low <= iteration <= x_scale.high:
            x = x_scale.place(iteration)
            yield f'<path class="mark" d="M{x:.1f} {_TOP}V{_HIGH - _BOTTOM}">'
            yield f"<title>{escape(text)}</title></path>"


def _curve(line: Line, name: str, x_scale: _Scale, y_scale: _Scale) -> Iterator[str]:
    line = thinned(line, 2 * _WIDE)
    pieces: list[list[str]] = [[]]
    for x, y in zip(line.x, line.y, strict=True):
        if math.isfinite(y):
            pieces[-1].append(f"{x_scale.place(x):.1f},{y_scale.place(y):.1f}")
        elif pieces[-1]:
            pieces.append([])
    for points in filter(None, pieces):
        if len(points) == 1:
            cx, cy = points[0].split(",")
            yield f'<circle cx="{cx}" cy="{cy}" r="2.5" class="{name}"/>'
        else:
            yield f'<polyline class="{name}" points="{" ".join(points)}"/>'
