"""Blends of several datasets: shares from weights, the order of samples, and the blended dataset."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.common.errors import DataError
from megatron.common.progress import with_progress
from megatron.config.data.corpora import SampleOrder
from megatron.data.sampling.batch_sampler import Sample
from megatron.data.sampling.index_cache import cached_maps
from megatron.data.sampling.index_map import IndexMap
from megatron.data.sampling.index_size import blend_room
from megatron.data.sampling.provenance import Origin, TracedSource


def shares_of(weights: Sequence[float], sample_order: SampleOrder = "bigscience") -> list[float]:
    """Return `weights` divided by their sum.

    Raises:
        ValueError: a weight is negative or NaN, or there is none above 0.

    Source: in float64, BigScience's Megatron-DeepSpeed adds one weight after the other, and
        Megatron Core calls numpy's sum, which adds from 8 weights on in several lanes.
    """
    if sample_order == "megatron-core":
        total = float(np.sum(np.array(weights, np.float64)))
    else:
        total = _sum_in_turn(weights)
    if not weights or min(weights) < 0 or not 0 < total < math.inf:
        raise ValueError(f"weights {list(weights)}: each is 0 or more, and one is above 0")
    return [weight / total for weight in weights]


def _sum_in_turn(weights: Sequence[float]) -> float:
    total = 0.0
    # Not sum(): since Python 3.12 it rounds once at the end, which would change some orders.
    for weight in weights:
        total += weight
    return total


_ONE = 1 << 29  # one sample, in fixed-point numbers of 32 bits: they go from -4 to 4
_TOP = 3 * _ONE  # from which on the next step might leave their range
_MOST_SETS = 1 << 8  # above it, too few bits are left to distinguish most of them
_BLOCK = 32  # steps after which the fixed-point numbers are made anew from exact ones


def lanes_for(num_sets: int) -> int:
    """Return the number of parallel stretches that fit the processor's cache."""
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
    step = min(1, num_steps)  # sample 0 is special: its index counts as 1
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
    """Return the counts taken after one step for each row of `sources` and `samples`.

    From sample 0 on, only one step is allowed.
    """
    taken = taken.copy()
    flat, rows = taken.reshape(-1), np.arange(len(taken)) * len(shares)
    # Full arrays rather than broadcast ones: numpy is twice as fast on them.
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
    that the largest number holds both. It wins if the second is lower by more than both may be off.
    """

    def __init__(self, shares: NDArray, taken: NDArray, firsts: NDArray, num_steps: int):
        self._shares = shares
        self._firsts = firsts
        self._taken = np.ascontiguousarray(taken.T)
        self._bits = (len(shares) - 1).bit_length()
        self._sets = np.arange(len(shares), dtype=np.int32)[:, None]
        unit = 1 << self._bits
        self._rise = np.rint(shares * (_ONE // unit)).astype(np.int32)[:, None] * np.int32(unit)
        # As large as the numbers: numpy adds full arrays twice as fast as broadcast ones.
        self._rise = np.broadcast_to(self._rise, self._taken.shape).copy()
        # Off at most: half a unit a step, truncation, and float64's rounding, each twice.
        rounding = np.spacing((firsts.max() + num_steps) * shares.max())
        self._margin = np.int32((_BLOCK + 3) * unit + int(4 * rounding * _ONE))

    @property
    def taken(self) -> NDArray:
        """Return the counts taken from each dataset, as `follow` does."""
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
        flat_index = np.empty(num_lanes, np.int64)
        all_best = np.empty(sources.shape, np.int32)
        doubts = 0
        for step in range(len(sources)):
            best, source = all_best[step], sources[step]
            np.maximum.reduce(numbers, axis=0, out=best)
            np.bitwise_and(best, mask, out=source)
            np.multiply(source, num_lanes, out=flat_index)
            flat_index += lanes
            flat[flat_index] = best - _ONE
            second = np.maximum.reduce(numbers, axis=0)
            second += self._margin
            doubtful = np.flatnonzero(second >= best)
            if doubtful.size:
                doubts += doubtful.size
                if doubts * 20 > sources.size:  # equal weights, most often
                    return False
                exact = self._shares[:, None] * (position[doubtful] + step) - taken[:, doubtful]
                chosen = exact.argmax(axis=0)
                flat[flat_index[doubtful]] += _ONE
                source[doubtful] = chosen
                flat_index[doubtful] = chosen * num_lanes + doubtful
                flat[flat_index[doubtful]] -= _ONE
            before = flat_taken[flat_index]
            samples[step] = before
            before += 1
            flat_taken[flat_index] = before
            numbers += self._rise
        return int(all_best.max()) < _TOP


def samples_wanted(
    weights: Sequence[float],
    num_samples: int,
    sample_order: SampleOrder = "bigscience",
    surplus: float = 0.005,
) -> list[int]:
    """Return the number of samples that a blend of `num_samples` takes from each dataset.

    A data set never gives more than its weight times the samples of the blend so far, plus one.

    Source: the surplus is added to the exact share of the samples in BigScience's
        Megatron-DeepSpeed, and to the share rounded up in Megatron Core.
    """
    exact = [num_samples * share for share in shares_of(weights, sample_order)]
    if sample_order == "megatron-core":
        return [math.ceil(math.ceil(count) * (1 + surplus)) for count in exact]
    return [math.ceil(count * (1 + surplus)) for count in exact]


@dataclass(frozen=True)
class BlendOrder:
    """Sample i of a blend is sample `samples[i]` of data set `sources[i]`."""

    sources: IndexMap
    samples: IndexMap


def blend_order(
    weights: Sequence[float],
    num_samples: int,
    sample_order: SampleOrder = "bigscience",
    *,
    warm_up: int = 500,
    num_pieces: int = 16,
) -> BlendOrder:
    """Return the dataset of each sample of a blend.

    Args:
        warm_up: steps that a stretch starts early, to forget where it started.
        num_pieces: of a stretch, after each of which it is compared with an earlier attempt.

    Sample i comes from the data set that is furthest behind its share of the first i samples: d
    with the largest share[d] * max(i, 1) - taken[d], the first of equals.

    One step needs the one before, so stretches of the blend are computed side by side, each from a
    guess some steps ahead of it: the samples taken of a data set follow from its share, up to one
    sample, and differences vanish on the way. Where the end of a stretch shows that the next one
    started wrong after all, that is computed again until it meets its earlier result.

    Shapes: -> [num_samples] int16 (int32 above 32767 data sets) and int32 (int64 above 2 ** 31).
    Source: Megatron-LM's build_blending_indices, rounding to float64 included.
    """
    shares = np.array(shares_of(weights, sample_order), dtype=np.float64)
    shares /= shares.sum()
    num_lanes = min(lanes_for(len(shares)), num_samples // (4 * warm_up) + 1)
    piece = -(-num_samples // (num_lanes * num_pieces))
    firsts = np.arange(num_lanes) * piece * num_pieces
    shape = (num_lanes, num_pieces, piece)
    is_narrow = len(shares) <= np.iinfo(np.int16).max
    sources = np.empty(shape, np.int16 if is_narrow else np.int32)
    is_narrow = num_samples <= np.iinfo(np.int32).max
    samples = np.empty(shape, np.int32 if is_narrow else np.int64)
    taken = np.full((num_pieces + 1, num_lanes, len(shares)), np.nan)
    taken[0] = _estimate_taken(shares, firsts, warm_up)
    lanes = np.arange(num_lanes)
    while len(lanes):
        for k in with_progress(range(num_pieces), "order of the blend", num_pieces, "parts"):
            end, *steps = follow(shares, taken[k, lanes], firsts[lanes] + k * piece, piece)
            sources[lanes, k], samples[lanes, k] = (each.T for each in steps)
            changed = (end != taken[k + 1, lanes]).any(axis=1)
            taken[k + 1, lanes] = end
            lanes = lanes[changed]
            if not len(lanes):
                break
        lanes = 1 + np.flatnonzero((taken[-1, :-1] != taken[0, 1:]).any(axis=1))
        taken[0, lanes] = taken[-1, lanes - 1]
    return BlendOrder(sources.ravel()[:num_samples], samples.ravel()[:num_samples])


def _estimate_taken(shares: NDArray, firsts: NDArray, warm_up: int) -> NDArray:
    """Estimate the samples taken from each dataset before each of `firsts`, the first being 0.

    Shapes: -> [firsts, data sets] float64 with integer values.
    """
    early = np.maximum(firsts - warm_up, 0)
    owed = shares * early[:, None]
    taken = np.floor(owed)
    missing = (early - taken.sum(axis=1)).astype(np.int64)
    by_rest = np.argsort(taken - owed, axis=1, kind="stable")
    for lane, count in enumerate(missing):
        taken[lane, by_rest[lane, : max(0, count)]] += 1
    if len(firsts) > 1:
        taken[1:], _, _ = follow(shares, taken[1:], early[1:], warm_up)
    return taken


class BlendedDataset:
    """Data sets read as one of `num_samples` samples, in proportion to their weights.

    Args:
        num_needed: samples that each of the data sets must have; see `samples_wanted`.
        prefix: of the token files next to which the order is kept; see `cached_maps`.

    Raises:
        DataError: a data set has too few samples.
    """

    def __init__(
        self,
        datasets: Sequence[TracedSource],
        weights: Sequence[float],
        *,
        num_samples: int,
        num_needed: Sequence[int],
        prefix: str,
        cache_directory: str | Path | None = None,
        sample_order: SampleOrder = "bigscience",
    ):
        self.datasets = datasets
        for dataset, wanted in zip(datasets, num_needed, strict=True):
            if len(dataset) < wanted:
                raise DataError(
                    f"a part of the blend has {len(dataset)} samples, {wanted} are wanted of it"
                )
        maps = cached_maps(
            f"blend {shares_of(weights, sample_order)} {num_samples}",
            {"sources": (num_samples,), "samples": (num_samples,)},
            lambda: dict(vars(blend_order(weights, num_samples, sample_order))),
            blend_room(len(weights), num_samples),
            prefix=prefix,
            directory=cache_directory,
        )
        self.order = BlendOrder(**maps)

    def __len__(self) -> int:
        return len(self.order.sources)

    def __getitem__(self, i: int) -> Sample:
        dataset, sample = self._place(i)
        return dataset[sample]

    def origin(self, i: int) -> Origin:
        """Return the token spans of sample i on disk."""
        dataset, sample = self._place(i)
        return dataset.origin(sample)

    def _place(self, i: int) -> tuple[TracedSource, int]:
        return self.datasets[self.order.sources[i]], int(self.order.samples[i])
