"""Which iterations are passed over."""

import re
from collections.abc import Iterator, Sequence

_RANGE = re.compile(r"(\d+(?:_\d+)*)-(\d+(?:_\d+)*)")


def plan_skips(texts: Sequence[str] | None) -> tuple[tuple[int, int], ...]:
    """Return first and last iteration of each range, in order; those that overlap are one."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(filter(None, map(_bounds, texts or ()))):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def is_skipped(iteration: int, skips: Sequence[tuple[int, int]]) -> bool:
    """Whether the step that is number `iteration`, from 1 on, is passed over."""
    return any(first <= iteration <= last for first, last in skips)


def skip_problems(texts: Sequence[str] | None) -> Iterator[str]:
    """Yield every range that is none."""
    for text in texts or ():
        bounds = _bounds(text)
        if bounds is None or not 1 <= bounds[0] <= bounds[1]:
            yield (
                f"--skip-train-iteration-range {text}: write FIRST-LAST, two iterations from 1 on, "
                "the second not before the first"
            )


def _bounds(text: str) -> tuple[int, int] | None:
    match = _RANGE.fullmatch(text)
    return (int(match[1]), int(match[2])) if match else None
