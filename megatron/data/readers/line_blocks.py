"""A stream of text, cut into blocks of complete lines; a line over the limit is not kept."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

EXCERPT_BYTES = 80
"""Of a line that is too long to be read."""


@dataclass(frozen=True)
class Limits:
    """Limits of the size of a block."""

    block_bytes: int  # a block ends with the line that passes this
    line_bytes: int  # a longer line is not read, but reported
    block_lines: int | None = None  # a block ends after so many lines at the latest


def whole_lines(pieces: Iterator[bytes], limits: Limits) -> Iterator[tuple[bytes, bool, int]]:
    """Yield (lines, False, their length), or (start of a line over the limit, True, its length)."""
    held: list[bytes | memoryview] = []  # complete lines that fill no block yet
    num_bytes = 0  # of them
    for lines, length, is_too_long in _cut_after_newlines(pieces, limits.line_bytes):
        if not is_too_long:
            held += lines
            num_bytes += length
            if num_bytes < limits.block_bytes and not limits.block_lines:
                continue
        data = b"".join(held)
        start = 0
        for end in _block_ends(data, limits):
            if end - start > limits.line_bytes:  # one line: blocks of several are smaller
                yield data[start : start + EXCERPT_BYTES], True, end - start
            else:
                yield data[start:end], False, end - start
            start = end
        held, num_bytes = [data[start:]], len(data) - start
        if is_too_long:
            if num_bytes:
                yield data[start:], False, num_bytes
            yield bytes(lines[0]), True, length
            held, num_bytes = [], 0
    if num_bytes:
        yield b"".join(held), False, num_bytes


def _cut_after_newlines(
    pieces: Iterator[bytes], line_bytes: int
) -> Iterator[tuple[list[bytes | memoryview], int, bool]]:
    """Yield (pieces of full lines, their length, False), or (start of a line, its length, True).

    The latter stands for a line over the limit of which no more is kept; a line over the limit
    that lies in one piece is yielded as a full line.
    """
    begun: list[bytes | memoryview] = []  # a line without its end
    length = 0  # of that line
    for piece in pieces:
        # Nothing but the new piece is searched: a long line takes the time of short ones.
        if length > line_bytes and (end := piece.find(b"\n") + 1):
            yield begun, length + end, True
            begun, length, piece = [], 0, piece[end:]
        rest = memoryview(piece)
        if end := piece.rfind(b"\n") + 1:
            yield [*begun, rest[:end]], length + end, False
            begun, length, rest = [], 0, rest[end:]
        begun.append(rest)
        length += len(rest)
        if length > line_bytes:
            begun = [b"".join(begun)[:EXCERPT_BYTES]]
    if length:
        yield begun, length, length > line_bytes


def _block_ends(held: bytes, limits: Limits) -> list[int]:
    """Return the ends of the blocks that can be made of `held`."""
    groups: list[int] = []
    if limits.block_lines:
        newlines = np.flatnonzero(np.frombuffer(held, "u1") == ord("\n"))
        groups = (newlines[limits.block_lines - 1 :: limits.block_lines] + 1).tolist()
    ends: list[int] = []
    start = 0
    for stop in [*groups, len(held)]:
        while stop - start >= limits.block_bytes:
            end = held.rfind(b"\n", start, start + limits.block_bytes) + 1
            end = end or held.find(b"\n", start, stop) + 1
            if not end:
                break
            ends.append(end)
            start = end
        if start < stop < len(held) or (groups and stop == groups[-1] and start < stop):
            ends.append(stop)
            start = stop
    return ends
