"""What differs between then and now, as a table that can be read."""

from collections.abc import Iterable
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

_WIDTH = 40
"""Columns of a value; of one that is longer, those are told where the difference lies."""


@dataclass(frozen=True)
class Difference:
    """Something with two values."""

    name: str
    then: Any
    now: Any


def table(differences: Iterable[Difference], *, what: str = "flag") -> str:
    """Return a line for each difference under a heading, in columns.

    Args:
        what: what the names are those of.
    """
    rows = [(what, "in the checkpoint", "now")]
    rows += [(each.name, *_texts(each)) for each in differences]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(
        f"  {name:<{widths[0]}}  {then:<{widths[1]}}  {now}" for name, then, now in rows
    )


def _texts(difference: Difference) -> tuple[str, str]:
    both = [
        "-" if value is None or value == "" else str(value)
        for value in (difference.then, difference.now)
    ]
    same = len(commonprefix(both))
    start = max(0, same - _WIDTH // 4) if max(map(len, both)) > _WIDTH else 0
    then, now = (_cut("…" + text[start:] if start else text) for text in both)
    return then, now


def _cut(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"
