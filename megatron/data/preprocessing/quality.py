"""Quality statistics of token files: runs, unknown tokens, hashes, and percentiles of lengths."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

SHORTEST_RUN = 16  # tokens; runs of fewer are nothing to report
SAMPLE_ONE_IN = 512  # documents that are decoded again, chosen by the hash of their tokens
MOST_CHARS = 300_000  # of a document that is, and of all the first ones; a second's work at most
_MOST_RUNS = 10
_MOST_EXAMPLES = 5
_EXAMPLE = 80  # characters
_EIGHT_EQUAL = np.uint64(0x0101010101010101)


@dataclass(frozen=True)
class Repetition:
    """One token, many times in a row."""

    length: int
    token: int
    document: int


@dataclass
class Tally:
    """Counts and examples of unusual tokens in the documents of one key."""

    odd_tokens: int = 0  # unknown tokens, and bytes that stand for themselves
    runs: list[Repetition] = field(default_factory=list)
    decoded: int = 0  # documents decoded again
    changed: int = 0  # of these, how many were another text then
    changed_examples: list[str] = field(default_factory=list)

    def add(self, other: "Tally", documents_before: int) -> None:
        """Add the tally of the documents that follow."""
        self.odd_tokens += other.odd_tokens
        later = [
            Repetition(run.length, run.token, run.document + documents_before) for run in other.runs
        ]
        self.runs = sorted([*self.runs, *later], key=lambda run: (-run.length, run.document))
        del self.runs[_MOST_RUNS:]
        self.decoded += other.decoded
        self.changed += other.changed
        self.changed_examples += other.changed_examples
        del self.changed_examples[_MOST_EXAMPLES:]

    def take_decoded(self, text: str, is_same: bool) -> None:
        """Count a document that was decoded again."""
        self.decoded += 1
        if not is_same:
            self.changed += 1
            self.changed_examples = [*self.changed_examples, text[:_EXAMPLE]][:_MOST_EXAMPLES]

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Tally":
        """Return the tally that was written as `content`."""
        return cls(**{**content, "runs": [Repetition(**run) for run in content["runs"]]})


class LongRuns:
    """Finds the longest runs of equal tokens within documents, which come piece by piece.

    Runs that cannot be among the longest any more are skipped.
    """

    def __init__(self) -> None:
        self._lengths = [SHORTEST_RUN - 1] * _MOST_RUNS  # of the longest so far, shortest first

    def __call__(self, tokens: NDArray, ends: NDArray) -> list[Repetition]:
        """Return those that may be among the longest of all so far, the longest first.

        Shapes: tokens [tokens]; ends [documents], where each document ends.
        """
        runs = runs_longer_than(self._lengths[0], tokens, ends, most=_MOST_RUNS)
        self._lengths = sorted([*self._lengths, *(run.length for run in runs)])[-_MOST_RUNS:]
        return runs


def runs_longer_than(
    length: int, tokens: NDArray, ends: NDArray, *, most: int | None = None
) -> list[Repetition]:
    """Return the runs of more than `length` equal tokens within a document, the longest first.

    Args:
        length: 15 or more.
        most: runs to return (default: all).
    """
    # Whether each token equals the one before it, padded with seven entries on either side.
    num_pairs = max(tokens.size - 1, 0)
    equal = np.zeros(8 + num_pairs // 8 * 8 + 16, np.bool_)
    pairs = equal[8 : 8 + num_pairs]
    np.equal(tokens[1:], tokens[:-1], out=pairs)
    pairs[ends[(ends > 0) & (ends < tokens.size)] - 1] = False
    # So many pairs in a row cover whole eights of them, which are found quickly.
    eights = np.flatnonzero(equal.view(np.uint64) == _EIGHT_EQUAL)
    if not eights.size:
        return []
    last_of_row = np.append(np.flatnonzero(np.diff(eights) != 1), eights.size - 1)
    eights_in_row = np.diff(last_of_row, prepend=-1)
    long_enough = eights_in_row >= (length - 7) // 8
    stops = 8 * eights[last_of_row[long_enough]] + 8
    starts = stops - 8 * eights_in_row[long_enough]
    # At either end of a row, fewer than eight pairs are left over.
    seven = np.arange(7)
    starts -= np.logical_and.accumulate(equal[starts[:, None] - 1 - seven], axis=1).sum(axis=1)
    stops += np.logical_and.accumulate(equal[stops[:, None] + seven], axis=1).sum(axis=1)
    starts, lengths = starts - 8, stops - starts + 1
    long = np.flatnonzero(lengths > length)
    long = long[np.argsort(-lengths[long], kind="stable")][:most]
    documents = np.searchsorted(ends, starts[long], "right")
    return [
        Repetition(int(lengths[i]), int(tokens[starts[i]]), int(document))
        for i, document in zip(long, documents, strict=True)
    ]


def hash_documents(tokens: NDArray, ends: NDArray) -> NDArray[np.uint64]:
    """Return 64 bits for each document; equal ones of one type of token have equal ones.

    Shapes: tokens [tokens]; ends [documents], where each document ends.
    Source: XXH3, https://github.com/Cyan4973/xxHash
    """
    data = tokens.view(np.uint8).data
    stops = (ends * tokens.itemsize).tolist()
    hashes = [xxh3_64_intdigest(data[i:j]) for i, j in zip([0, *stops], stops, strict=False)]
    return np.array(hashes, np.uint64)


PERCENTILES = (1, 5, 25, 50, 75, 95, 99)


class Lengths:
    """Exact percentiles of document lengths, in bounded memory.

    Args:
        exact_below: lengths below it are counted one by one; the few longer ones are kept.
    """

    def __init__(self, exact_below: int = 1 << 20) -> None:
        self._exact_below = exact_below
        self.documents = 0
        self.tokens = 0
        self._counts = np.zeros(exact_below, np.int64)
        self._num_counts = 1  # the rest is zero
        self._large: list[int] = []

    def add(self, sizes: NDArray) -> None:
        """Count these sizes."""
        self.documents += len(sizes)
        self.tokens += int(sizes.sum())
        small = sizes[sizes < self._exact_below]
        counts = np.bincount(small)
        self._counts[: len(counts)] += counts
        self._num_counts = max(self._num_counts, len(counts))
        self._large += sizes[sizes >= self._exact_below].tolist()

    def count(self, low: int, high: int | None = None) -> int:
        """Return the number of documents of `low` to `high` tokens, both included."""
        large = sum(1 for size in self._large if low <= size and (high is None or size <= high))
        return int(self._counts[low : None if high is None else high + 1].sum()) + large

    def summary(self) -> dict[str, float]:
        """Return mean, extremes and percentiles: the smallest size not below a share of all."""
        cumulated = np.cumsum(self._counts[: self._num_counts])
        large = sorted(self._large)

        def at_rank(rank: int) -> int:
            below = int(cumulated[-1])
            return (
                int(np.searchsorted(cumulated, rank)) if rank <= below else large[rank - below - 1]
            )

        if not self.documents:
            return {"mean": 0.0, "min": 0, **{f"p{p}": 0 for p in PERCENTILES}, "max": 0}
        return {
            "mean": self.tokens / self.documents,
            "min": at_rank(1),
            **{f"p{p}": at_rank(math.ceil(self.documents * p / 100)) for p in PERCENTILES},
            "max": at_rank(self.documents),
        }


def readable_lengths(summary: Mapping[str, float]) -> str:
    """Return a summary for people."""
    percentiles = ", ".join(f"{summary[f'p{p}']} ({p}%)" for p in PERCENTILES)
    return (
        f"tokens per document: mean {summary['mean']:.1f}, {summary['min']} to {summary['max']}: "
        f"{percentiles}"
    )
