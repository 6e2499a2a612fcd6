"""Stretches of tokens of which some are judged by the ones before them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """Tokens that the network reads together.

    Args:
        tokens: all but the last are read.
        judged: of so many at the end the probability is wanted; at least 1, and not of the first.
    """

    tokens: tuple[int, ...]
    judged: int


def sliding_windows(tokens: Sequence[int], *, length: int, stride: int) -> Iterator[Window]:
    """Yield windows of which each begins `stride` tokens after the one before it.

    Every token but the first is judged once, in the first window that it is in.

    Args:
        length: most tokens that are read at once.
        stride: at most `length`.

    >>> [window.tokens for window in sliding_windows(range(6), length=3, stride=2)]
    [(0, 1, 2, 3), (2, 3, 4, 5)]
    """
    start = judged = 0
    while judged < len(tokens) - 1:
        end = min(start + length, len(tokens) - 1)
        yield Window(tuple(tokens[start : end + 1]), end - judged)
        start, judged = start + stride, end


def full_windows(tokens: Sequence[int], *, length: int) -> Iterator[Window]:
    """Yield windows that follow each other, but for the last, which goes back to be full.

    Every token but the first is judged once. These are lm_eval's.

    >>> [(window.tokens, window.judged) for window in full_windows(range(6), length=3)]
    [((0, 1, 2, 3), 3), ((2, 3, 4, 5), 2)]
    """
    for judged in range(0, len(tokens) - 1, length):
        end = min(judged + length, len(tokens) - 1)
        yield Window(tuple(tokens[max(0, end - length) : end + 1]), end - judged)


def last_window(context: Sequence[int], target: Sequence[int], *, length: int) -> Window:
    """Return the window in which `target` is judged by as much of `context` as can be read.

    Args:
        context: one token at least.
        target: one at least, and at most `length`.
    """
    return Window((*context, *target)[-length - 1 :], len(target))
