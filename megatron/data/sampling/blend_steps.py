"""The rule of a blend, followed for many stretches of it side by side."""

import numpy as np
from numpy.typing import NDArray

_ONE = 1 << 29  # one sample, in fixed-point numbers of 32 bits: they go from -4 to 4
_TOP = 3 * _ONE  # from which on the next step might leave their range
_MOST_SETS = 1 << 8  # above it, too few bits are left to tell most of them apart
_BLOCK = 32  # steps after which the fixed-point numbers are made anew from exact ones


def lanes_for(num_sets: int) -> int:
    """Return how many stretches side by side still fit the processor's cache."""
    cells = 140_000 if num_sets <= _MOST_SETS else 20_000
    return min(2000, max(16, cells // num_sets))


def follow(
    shares: NDArray, taken: NDArray, firsts: NDArray, num_steps: int
) -> tuple[NDArray, NDArray, NDArray]:
    """Take `num_steps` samples by the rule, side by side from sample `firsts` on.

    Shapes: taken [lanes, data sets], before and, returned, after; firsts [lanes];
        -> also data sets [steps, lanes] and their samples [steps, lanes].
    """
    sources = np.empty((num_steps, len(taken)), np.int32)
    samples = np.empty((num_steps, len(taken)), np.int64)
    step = min(1, num_steps)  # sample 0 is not like the others: its place counts as 1
    taken = _follow_exactly(shares, taken, firsts, sources[:step], samples[:step])
    if len(shares) <= _MOST_SETS:
        race = _Race(shares, taken, firsts, num_steps)
        while step < num_steps:
            to = slice(step, min(step + _BLOCK, num_steps))
            if not race.run(step, sources[to], samples[to]):
                break
            step = to.stop
        taken = race.taken
    taken = _follow_exactly(shares, taken, firsts + step, sources[step:], samples[step:])
    return taken, sources, samples


def _follow_exactly(
    shares: NDArray, taken: NDArray, firsts: NDArray, sources: NDArray, samples: NDArray
) -> NDArray:
    """Return what is taken after one step for each row of `sources` and `samples`.

    From sample 0 on, one step is all that may be asked for.
    """
    taken = taken.copy()
    flat, rows = taken.reshape(-1), np.arange(len(taken)) * len(shares)
    # Whole arrays rather than broadcast ones: numpy is twice as fast on them.
    all_shares = np.broadcast_to(shares, taken.shape).copy()
    position = np.broadcast_to(firsts[:, None], taken.shape).astype(np.float64)
    position[firsts == 0] = 1
    behind = np.empty_like(taken)
    for step in range(len(sources)):
        np.multiply(position, all_shares, out=behind)
        np.subtract(behind, taken, out=behind)
        best = behind.argmax(axis=1)
        sources[step] = best
        best += rows
        before = flat[best]
        samples[step] = before
        flat[best] = before + 1
        position += 1
    return taken


class _Race:
    """The same steps in fixed-point numbers, which are small, and exact ones where two are close.

    How far data set d is behind is held in multiples of 2 ** bits, with d in the bits below, so
    that the largest number says both. It wins if the second is lower by more than both may be off.
    """

    def __init__(self, shares: NDArray, taken: NDArray, firsts: NDArray, num_steps: int):
        self._shares = shares
        self._firsts = firsts
        self._taken = np.ascontiguousarray(taken.T)
        self._bits = (len(shares) - 1).bit_length()
        self._sets = np.arange(len(shares), dtype=np.int32)[:, None]
        unit = 1 << self._bits
        self._rise = np.rint(shares * (_ONE // unit)).astype(np.int32)[:, None] * np.int32(unit)
        # As large as the numbers: numpy adds whole arrays twice as fast as broadcast ones.
        self._rise = np.broadcast_to(self._rise, self._taken.shape).copy()
        # Off at most: half a unit a step, what is cut off, and float64's own rounding, each twice.
        rounding = np.spacing((firsts.max() + num_steps) * shares.max())
        self._margin = np.int32((_BLOCK + 3) * unit + int(4 * rounding * _ONE))

    @property
    def taken(self) -> NDArray:
        """Return what is taken of each data set, as `follow` does."""
        return np.ascontiguousarray(self._taken.T)

    def run(self, step: int, sources: NDArray, samples: NDArray) -> bool:
        """Fill the rows of `sources` and `samples`, or return False and change nothing else."""
        position = (self._firsts + step).astype(np.float64)
        behind = np.multiply(self._shares[:, None], position)
        behind -= self._taken
        if not -_TOP < _ONE * behind.min() <= _ONE * behind.max() < _TOP - _ONE:
            return False
        behind *= _ONE >> self._bits
        numbers = np.floor(behind, out=behind).astype(np.int32)
        numbers <<= self._bits
        numbers |= self._sets
        taken = self._taken.copy()
        if not self._run(numbers, taken, position, sources, samples):
            return False
        self._taken = taken
        return True

    def _run(
        self,
        numbers: NDArray,
        taken: NDArray,
        position: NDArray,
        sources: NDArray,
        samples: NDArray,
    ) -> bool:
        flat, flat_taken = numbers.reshape(-1), taken.reshape(-1)
        num_lanes = numbers.shape[1]
        lanes = np.arange(num_lanes)
        mask = np.int32((1 << self._bits) - 1)
        place = np.empty(num_lanes, np.int64)
        all_best = np.empty(sources.shape, np.int32)
        doubts = 0
        for step in range(len(sources)):
            best, source = all_best[step], sources[step]
            np.maximum.reduce(numbers, axis=0, out=best)
            np.bitwise_and(best, mask, out=source)
            np.multiply(source, num_lanes, out=place)
            place += lanes
            flat[place] = best - _ONE
            second = np.maximum.reduce(numbers, axis=0)
            second += self._margin
            doubtful = np.flatnonzero(second >= best)
            if doubtful.size:
                doubts += doubtful.size
                if doubts * 20 > sources.size:  # equal weights, most often
                    return False
                exact = self._shares[:, None] * (position[doubtful] + step) - taken[:, doubtful]
                chosen = exact.argmax(axis=0)
                flat[place[doubtful]] += _ONE
                source[doubtful] = chosen
                place[doubtful] = chosen * num_lanes + doubtful
                flat[place[doubtful]] -= _ONE
            before = flat_taken[place]
            samples[step] = before
            before += 1
            flat_taken[place] = before
            numbers += self._rise
        return int(all_best.max()) < _TOP
