"""Packages that prove.sh needs, found before anything of them is imported."""

import re
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
IMAGE = frozenset({"torch", "triton", "numpy", "transformers"})
"""Packages of an image for training, with all that they need."""


def needed_packages() -> list[str]:
    """Return the packages that training, the server and the checks name as requirements."""
    lines = (REPOSITORY / "requirements.txt").read_text().partition("\n# [")[0].splitlines()
    lines += (REPOSITORY / "requirements-server.txt").read_text().splitlines()
    return ["pytest", *(_name(line) for line in lines if line and line[0] != "#")]


def missing_packages(names: Sequence[str]) -> list[str]:
    """Return which of these packages, and of those that they require, are not installed."""
    return sorted({name for name, requirements in walk(names) if requirements is None})


def walk(names: Sequence[str], below: frozenset[str] = IMAGE) -> Iterator[tuple[str, list | None]]:
    """Yield each package, with its requirements; None for one that is not installed.

    Args:
        below: packages whose requirements are not followed.
    """
    seen, waiting = set(), list(names)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            lines = requires(name) or []
        except PackageNotFoundError:
            yield name, None
            continue
        found = [] if name in below else [_name(line) for line in lines if _applies(line)]
        waiting += found
        yield name, found


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def _applies(requirement: str) -> bool:
    """Whether a requirement has no condition, or one that this Python and system meet."""
    from packaging.requirements import Requirement

    marker = Requirement(requirement).marker
    return marker is None or marker.evaluate({"extra": ""})
