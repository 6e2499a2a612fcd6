"""Pairs of input and target packed into rows of one length, in random order."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.data.sampling.verified_memmap import IndexMap


@dataclass(frozen=True)
class Packing:
    """Row r holds the pairs `pair_order[row_starts[r] : row_starts[r + 1]]`."""

    pair_order: IndexMap
    row_starts: IndexMap


def fitting(lengths: NDArray, row_length: int) -> NDArray:
    """Return which pairs a row can take. Shapes: lengths [pairs] -> [pairs] bool."""
    return (lengths > 0) & (lengths <= row_length)


def pack(lengths: NDArray, pairs: range, *, num_rows: int, row_length: int, seed: int) -> Packing:
    """Pack `pairs` into at least `num_rows` rows, going through all of them as often as needed.

    A row takes pairs in their order until the next one does not fit. What is open at the end of an
    epoch is filled up from the next. Pairs that are empty or longer than a row are left out.

    Args:
        lengths: tokens of each of `pairs`, input and target together.

    Raises:
        ValueError: no pair fits.

    Shapes: lengths [len(pairs)] int64 -> pair_order [pairs used], row_starts [rows + 1] int64.
    Randomness: one generator, numpy.random.RandomState(seed), shuffles each epoch in turn.
    """
    fits = fitting(lengths, row_length)
    if not fits.any():
        raise ValueError(f"none of them fits into {row_length} tokens")
    rng = np.random.RandomState(seed % 2**32)
    closed: list[NDArray] = []
    starts, before = [0], 0
    waiting = np.array([], np.int64)
    while len(starts) <= num_rows:
        epoch = np.arange(len(pairs))
        rng.shuffle(epoch)
        waiting = np.concatenate([waiting, epoch[fits[epoch]]])
        ends = np.cumsum(lengths[waiting])
        start = 0
        while True:
            taken = int(ends[start - 1]) if start else 0
            stop = int(np.searchsorted(ends, taken + row_length, side="right"))
            if stop == len(waiting):
                break
            starts.append(before + stop)
            start = stop
        closed.append(waiting[:start])
        before += start
        waiting = waiting[start:]
    return Packing(np.concatenate(closed) + pairs.start, np.array(starts, np.int64))
