"""What differs between then and now, as a table that can be read."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


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
    rows += [(each.name, _text(each.then), _text(each.now)) for each in differences]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(
        f"  {name:<{widths[0]}}  {then:<{widths[1]}}  {now}" for name, then, now in rows
    )


def _text(value: Any) -> str:
    return "-" if value is None or value == "" else str(value)
