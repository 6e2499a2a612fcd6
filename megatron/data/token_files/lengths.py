"""Document lengths: exact percentiles, by one definition for all tools."""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
_EXACT_BELOW = 1 << 20  # sizes that are counted one by one


class Lengths:
    """Exact percentiles of numbers too many to keep."""

    def __init__(self) -> None:
        self.documents = 0
        self.tokens = 0
        self._counts = np.zeros(_EXACT_BELOW, np.int64)
        self._num_counts = 1  # the rest is zero
        self._large: list[int] = []

    def add(self, sizes: NDArray) -> None:
        """Count these sizes."""
        self.documents += len(sizes)
        self.tokens += int(sizes.sum())
        small = sizes[sizes < _EXACT_BELOW]
        counts = np.bincount(small)
        self._counts[: len(counts)] += counts
        self._num_counts = max(self._num_counts, len(counts))
        self._large += sizes[sizes >= _EXACT_BELOW].tolist()

    def count(self, low: int, high: int | None = None) -> int:
        """Return the number of documents of `low` to `high` tokens, both included."""
        large = sum(1 for size in self._large if low <= size and (high is None or size <= high))
        return int(self._counts[low : None if high is None else high + 1].sum()) + large

    def summary(self) -> dict[str, float]:
        """Return mean, extremes and percentiles: the smallest size not below a share of all."""
        cumulated = np.cumsum(self._counts[: self._num_counts])
        large = sorted(self._large)

        def ranked(rank: int) -> int:
            below = int(cumulated[-1])
            return (
                int(np.searchsorted(cumulated, rank)) if rank <= below else large[rank - below - 1]
            )

        if not self.documents:
            return {"mean": 0.0, "min": 0, **{f"p{p}": 0 for p in PERCENTILES}, "max": 0}
        return {
            "mean": self.tokens / self.documents,
            "min": ranked(1),
            **{f"p{p}": ranked(math.ceil(self.documents * p / 100)) for p in PERCENTILES},
            "max": ranked(self.documents),
        }


def readable_lengths(summary: Mapping[str, float]) -> str:
    """Return a summary for people."""
    percentiles = ", ".join(f"{summary[f'p{p}']} ({p}%)" for p in PERCENTILES)
    return (
        f"tokens per document: mean {summary['mean']:.1f}, {summary['min']} to {summary['max']}: "
        f"{percentiles}"
    )
