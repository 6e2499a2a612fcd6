"""Near duplicates among documents: candidates by fingerprint, proof by shingles."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.common.process_pool import ordered_map
from megatron.data.cleaning.fingerprints import Fingerprints, Location, Source, Texts, shingles

SIMILAR = 0.5  # pairs are reported above this

_CHUNK_DOCUMENTS = 1 << 16
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio, as in Fibonacci hashing


@dataclass(frozen=True)
class Pair:
    """Two documents by their index in the fingerprints; `main` comes first."""

    main: int
    other: int
    similarity: float


@dataclass(frozen=True)
class Bucket:
    """Documents, in their order, that agree in one band of their fingerprints."""

    indices: tuple[int, ...]
    locations: tuple[Location, ...]


def jaccard(one: set[str], other: set[str], kind: str) -> float:
    """Return the Jaccard similarity of two sets of shingles: the common ones over all of both.

    With kind "min" or "max" they are divided by those of the smaller or the larger set. Two empty
    sets are the same; an empty one and another have nothing in common.
    """
    if not one or not other:
        return float(one == other)
    sizes = {"min": min(len(one), len(other)), "max": max(len(one), len(other))}
    common = len(one & other)
    return common / (sizes.get(kind) or len(one) + len(other) - common)


@dataclass(frozen=True)
class CompareBucket:
    """Finds the similar pairs of a bucket.

    The first document of those left is compared with all others, and what is similar to it leaves
    the bucket with it; that happens `rounds` times, or until one is left if that is -1.
    """

    sources: tuple[Source, ...]
    kind: str
    rounds: int

    def __call__(self, bucket: Bucket) -> list[Pair]:
        """Return the pairs with a similarity over SIMILAR."""
        found: list[Pair] = []
        left = list(range(len(bucket.indices)))
        done = 0
        with Texts(self.sources) as texts:
            while len(left) > 1 and done != self.rounds:
                main, *others = left
                main_shingles = shingles(texts.text(bucket.locations[main]))
                left = []
                for other in others:
                    other_shingles = shingles(texts.text(bucket.locations[other]))
                    similarity = jaccard(main_shingles, other_shingles, self.kind)
                    if similarity > SIMILAR:
                        found.append(Pair(bucket.indices[main], bucket.indices[other], similarity))
                    else:
                        left.append(other)
                done += 1
        return found


def similar_pairs(
    fingerprints: Fingerprints, compare: Callable[[Bucket], list[Pair]], *, bands: int, workers: int
) -> tuple[NDArray, NDArray, NDArray]:
    """Return main, other and similarity of all similar pairs, by main and then other.

    Args:
        compare: what finds the pairs of a bucket, sent to each of the workers.
        bands: pieces of a fingerprint, one of which must agree for a pair to be compared.
    """
    found = _Found(len(fingerprints.documents))
    # One stream over all bands, so that the workers start once. What is known when a bucket is
    # made only saves work: such a pair would be found again.
    buckets = (
        bucket for band in range(bands) for bucket in _buckets(fingerprints, band, bands, found)
    )
    for pairs in ordered_map(compare, buckets, workers):
        found.add(pairs)
    return found.columns()


class _Found:
    """The pairs found so far, as one number each: main * number of documents + other."""

    def __init__(self, num_documents: int):
        self._num_documents = num_documents
        self._codes = np.zeros(0, "i8")  # sorted
        self._similarities = np.zeros(0)
        self._new: list[Pair] = []

    def add(self, pairs: list[Pair]) -> None:
        self._new += pairs

    def codes(self) -> NDArray:
        """Return all codes, sorted."""
        if self._new:
            codes = [pair.main * self._num_documents + pair.other for pair in self._new]
            similarities = [pair.similarity for pair in self._new]
            self._codes, first = np.unique(
                np.concatenate([self._codes, np.array(codes, "i8")]), return_index=True
            )
            self._similarities = np.concatenate([self._similarities, similarities])[first]
            self._new = []
        return self._codes

    def columns(self) -> tuple[NDArray, NDArray, NDArray]:
        """Return main, other and similarity of all pairs."""
        mains, others = np.divmod(self.codes(), max(self._num_documents, 1))
        return mains, others, self._similarities


def _buckets(fingerprints: Fingerprints, band: int, bands: int, found: _Found) -> Iterator[Bucket]:
    """Yield the buckets to compare for one band, without pairs that are found already."""
    known = found.codes()
    documents = fingerprints.documents
    hashes = _band_hashes(documents, band, bands)
    order = np.argsort(hashes, kind="stable")
    is_first = np.append(True, np.diff(hashes[order]) != 0) if len(order) else np.zeros(0, bool)
    starts = np.append(np.flatnonzero(is_first), len(order))
    sizes = np.diff(starts)
    for start, size in zip(starts[:-1][sizes > 1], sizes[sizes > 1], strict=True):
        main, *others = order[start : start + size].tolist()
        codes = main * len(documents) + np.array(others, "i8")
        new = ~_are_in(codes, known)
        members = [main, *itertools.compress(others, new)]
        if len(members) > 1:
            yield Bucket(tuple(members), tuple(map(fingerprints.location, members)))


def _are_in(values: NDArray, ordered: NDArray) -> NDArray:
    """Return for each of `values` whether it is in `ordered`."""
    if not len(ordered):
        return np.zeros(len(values), bool)
    nearest = np.searchsorted(ordered, values).clip(max=len(ordered) - 1)
    return ordered[nearest] == values


def _band_hashes(documents: NDArray, band: int, bands: int) -> NDArray:
    """Return 64 bits of each document that agree if the band of the fingerprints does."""
    rows = documents.dtype["minhash"].shape[0] // bands
    hashes = np.zeros(len(documents), "u8")
    for start in range(0, len(documents), _CHUNK_DOCUMENTS):
        chunk = slice(start, start + _CHUNK_DOCUMENTS)
        values = documents[chunk]["minhash"][:, band * rows : (band + 1) * rows]
        for column in values.T.astype("u8"):
            hashes[chunk] = (hashes[chunk] ^ column) * _MIX
            hashes[chunk] ^= hashes[chunk] >> np.uint64(29)
    return hashes
