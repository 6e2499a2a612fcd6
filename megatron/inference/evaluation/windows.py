"""Context windows: sliding or disjoint, with the target tokens that each one scores."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """Tokens of one forward pass.

    Args:
        tokens: the input is all of them but the last.
        num_targets: number of tokens at the end to score; at least 1, without the first token.
    """

    tokens: tuple[int, ...]
    num_targets: int


def sliding_windows(tokens: Sequence[int], *, length: int, stride: int) -> Iterator[Window]:
    """Yield windows, each `stride` tokens after the one before it.

    Every token but the first is scored once, in the first window that contains it.

    Args:
        length: most input tokens of a window.
        stride: at most `length`.

    >>> [window.tokens for window in sliding_windows(range(6), length=3, stride=2)]
    [(0, 1, 2, 3), (2, 3, 4, 5)]
    """
    start = scored = 0
    while scored < len(tokens) - 1:
        end = min(start + length, len(tokens) - 1)
        yield Window(tuple(tokens[start : end + 1]), end - scored)
        start, scored = start + stride, end


def full_windows(tokens: Sequence[int], *, length: int) -> Iterator[Window]:
    """Yield consecutive full windows; the last one overlaps the one before it.

    Every token but the first is scored once. These are lm_eval's rolling windows.

    >>> [(window.tokens, window.num_targets) for window in full_windows(range(6), length=3)]
    [((0, 1, 2, 3), 3), ((2, 3, 4, 5), 2)]
    """
    for scored in range(0, len(tokens) - 1, length):
        end = min(scored + length, len(tokens) - 1)
        yield Window(tuple(tokens[max(0, end - length) : end + 1]), end - scored)


def last_window(context: Sequence[int], target: Sequence[int], *, length: int) -> Window:
    """Return the window that scores `target` after as much of `context` as fits.

    Args:
        context: one token at least.
        target: one at least, and at most `length`.
    """
    return Window((*context, *target)[-length - 1 :], len(target))
