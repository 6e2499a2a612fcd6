"""Several data sets read as one: which of them gives the next sample, from weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.common.errors import DataError
from megatron.config.data.corpora import SampleOrder
from megatron.data.sampling.batch_sampler import Sample
from megatron.data.sampling.blend_steps import follow, lanes_for
from megatron.data.sampling.index_cache import cached_maps
from megatron.data.sampling.index_size import blend_room
from megatron.data.sampling.provenance import Origin, TracedSource
from megatron.data.sampling.shares import shares_of
from megatron.data.sampling.verified_memmap import IndexMap

_WARM_UP = 500  # steps that a stretch starts early, to forget where it started
_PIECES = 16  # of a stretch, after each of which it is compared with an earlier attempt


def samples_wanted(
    weights: Sequence[float],
    num_samples: int,
    sample_order: SampleOrder = "bigscience",
    surplus: float = 0.005,
) -> list[int]:
    """Return how many samples a blend of `num_samples` asks of each data set.

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
    weights: Sequence[float], num_samples: int, sample_order: SampleOrder = "bigscience"
) -> BlendOrder:
    """Return where the samples of a blend come from.

    Sample i comes from the data set that is furthest behind its share of the first i samples: d
    with the largest share[d] * max(i, 1) - taken[d], the first of equals.

    One step needs the one before, so stretches of the blend are computed side by side, each from a
    guess some steps ahead of it: what is taken of a data set follows from its share, up to a
    sample, and differences vanish on the way. Where the end of a stretch shows that the next one
    started wrong after all, that is computed again until it meets what it was before.

    Shapes: -> [num_samples] int16 (int32 above 32767 data sets) and int32 (int64 above 2 ** 31).
    Source: Megatron-LM's build_blending_indices, rounding to float64 included.
    """
    shares = np.array(shares_of(weights, sample_order), dtype=np.float64)
    shares /= shares.sum()
    num_lanes = min(lanes_for(len(shares)), num_samples // (4 * _WARM_UP) + 1)
    piece = -(-num_samples // (num_lanes * _PIECES))
    firsts = np.arange(num_lanes) * piece * _PIECES
    shape = (num_lanes, _PIECES, piece)
    is_narrow = len(shares) <= np.iinfo(np.int16).max
    sources = np.empty(shape, np.int16 if is_narrow else np.int32)
    is_narrow = num_samples <= np.iinfo(np.int32).max
    samples = np.empty(shape, np.int32 if is_narrow else np.int64)
    taken = np.full((_PIECES + 1, num_lanes, len(shares)), np.nan)
    taken[0] = _taken_before(shares, firsts)
    lanes = np.arange(num_lanes)
    while len(lanes):
        for k in range(_PIECES):
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


def _taken_before(shares: NDArray, firsts: NDArray) -> NDArray:
    """Guess what is taken of each data set before each of the samples `firsts`, the first being 0.

    Shapes: -> [firsts, data sets] float64, whole numbers.
    """
    early = np.maximum(firsts - _WARM_UP, 0)
    owed = shares * early[:, None]
    taken = np.floor(owed)
    missing = (early - taken.sum(axis=1)).astype(np.int64)
    by_rest = np.argsort(taken - owed, axis=1, kind="stable")
    for lane, count in enumerate(missing):
        taken[lane, by_rest[lane, : max(0, count)]] += 1
    if len(firsts) > 1:
        taken[1:], _, _ = follow(shares, taken[1:], early[1:], _WARM_UP)
    return taken


class BlendedDataset:
    """Data sets read as one of `num_samples` samples, in proportion to their weights.

    Args:
        num_needed: samples that each of the data sets must have; see `samples_wanted`.
        prefix: of the token files beside which the order is kept; see `cached_maps`.

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
        """Return where the tokens of sample i are on disk."""
        dataset, sample = self._place(i)
        return dataset.origin(sample)

    def _place(self, i: int) -> tuple[TracedSource, int]:
        return self.datasets[self.order.sources[i]], int(self.order.samples[i])
