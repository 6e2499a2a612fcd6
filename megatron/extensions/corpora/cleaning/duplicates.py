"""Near duplicates among documents: candidates by MinHash bands, proof by shingles.

Documents that agree in a band of their fingerprints form a bucket. Bands and candidates are sorted
on disk: memory does not grow with the number of documents.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron.common.process_pool import ordered_map
from megatron.extensions.corpora.cleaning.external_sort import (
    ExternalSorter,
    unique_blocks,
    with_firsts,
)
from megatron.extensions.corpora.cleaning.fingerprints import Source, Texts, document_ids, shingles

SIMILAR = 0.5  # pairs are reported above this
BAND = np.dtype([("key", "<u8"), ("document", "<u8"), ("sketch", "<u8")])
PAIR = np.dtype([("main", "<u8"), ("other", "<u8")])
SIMILAR_PAIR = np.dtype([*PAIR.descr, ("similarity", "<f8")])

_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio, as in Fibonacci hashing
SKETCH_BITS = 64
_ITEM_PAIRS = 256  # that a worker compares at once
_KEPT_SHINGLES = 16


def jaccard(one: set[str], other: set[str], kind: str) -> float:
    """Return the Jaccard similarity of two sets of shingles: the common ones over all of both.

    With kind "min" or "max" they are divided by the size of the smaller or the larger set. Two
    empty sets are the same; an empty one and another have nothing in common.
    """
    if not one or not other:
        return float(one == other)
    sizes = {"min": min(len(one), len(other)), "max": max(len(one), len(other))}
    common = len(one & other)
    return common / (sizes.get(kind) or len(one) + len(other) - common)


def band_records(entries: NDArray, bands: int) -> NDArray:
    """Return a record for each document and band; keys are equal where documents agree in a band.

    The sketch has one bit of each number of the fingerprint.
    Source: Li and Koenig, b-Bit Minwise Hashing, 2010.
    """
    rows = entries.dtype["minhash"].shape[0] // bands
    records = np.zeros((bands, len(entries)), BAND)
    for bit, values in enumerate(entries["minhash"].T[:SKETCH_BITS]):
        records["sketch"] |= (values.astype("u8") & np.uint64(1)) << np.uint64(bit)
    records["document"] = document_ids(entries["source"], entries["offset"])
    for band, values in enumerate(records):
        hashes = np.full(len(entries), band, "u8")
        for column in entries["minhash"][:, band * rows : (band + 1) * rows].T.astype("u8"):
            hashes = (hashes ^ column) * _MIX
            hashes ^= hashes >> np.uint64(29)
        values["key"] = hashes
    return records.reshape(-1)


@dataclass(frozen=True)
class ComparePairs:
    """Measures the similarity of candidate pairs by the shingles of their texts."""

    sources: tuple[Source, ...]
    kind: str = "union"
    threshold: float = SIMILAR

    def __call__(self, pairs: NDArray) -> NDArray:
        """Return the pairs with a similarity over the threshold, with it."""
        found = np.zeros(len(pairs), SIMILAR_PAIR)
        found["main"], found["other"] = pairs["main"], pairs["other"]
        with Texts(self.sources) as texts:
            of = lru_cache(_KEPT_SHINGLES)(lambda document: shingles(texts.text(document)))
            found["similarity"] = [
                jaccard(of(main), of(other), self.kind) for main, other in pairs.tolist()
            ]
        return found[found["similarity"] > self.threshold]


@dataclass(frozen=True)
class CompareBucket:
    """Finds the similar pairs of a bucket in several rounds.

    The first document of those left is compared with the rest, and every similar document leaves
    the bucket with it; that happens `rounds` times, or until one is left if that is -1.
    """

    compare: ComparePairs
    rounds: int

    def __call__(self, bucket: NDArray) -> NDArray:
        """Return the similar pairs among the documents of a bucket."""
        found = [np.zeros(0, SIMILAR_PAIR)]
        while len(bucket) > 1 and len(found) != self.rounds + 1:
            pairs = np.zeros(len(bucket) - 1, PAIR)
            pairs["main"], pairs["other"] = bucket[0], bucket[1:]
            found.append(self.compare(pairs))
            bucket = bucket[1:][~np.isin(bucket[1:], found[-1]["other"])]
        return np.concatenate(found)


def similar_pairs(
    bands: Iterable[NDArray],
    compare: ComparePairs,
    scratch: BinaryIO,
    *,
    rounds: int,
    workers: int,
) -> Iterator[NDArray]:
    """Yield all similar pairs, by main and then other.

    Args:
        bands: sorted records of `band_records`, in blocks.
        compare: sent to each of the workers.
        scratch: an empty file for the pairs.
        rounds: see `CompareBucket`. With 1, candidates are known before any is compared, and no
            pair is compared twice.
    """
    if rounds == 1:
        candidates = ExternalSorter(scratch, PAIR)
        for pairs in first_pairs(bands):
            candidates.add(pairs)
        items = split_blocks(unique_blocks(candidates.blocks()))
        yield from ordered_map(compare, items, workers)
        return
    found = ExternalSorter(scratch, SIMILAR_PAIR)
    for pairs in ordered_map(CompareBucket(compare, rounds), buckets(bands), workers):
        found.add(pairs)
    yield from unique_blocks(found.blocks())


def most_differences(similarity: float, num_seeds: int) -> int:
    """Return in how many bits the sketches of two similar documents differ at most.

    Of pairs at this very similarity, one in a thousand has more.
    """
    num_bits = min(num_seeds, SKETCH_BITS)
    share = (1 - similarity) / 2
    return int(num_bits * share + 3 * (num_bits * share * (1 - share)) ** 0.5)


def first_pairs(bands: Iterable[NDArray], most: int = SKETCH_BITS) -> Iterator[NDArray]:
    """Yield the pairs of the first document of each bucket and each other document of it.

    Args:
        bands: sorted records of `band_records`, in blocks.
        most: bits in which the sketches of a pair differ at most.
    """
    for records, firsts in with_firsts(bands):
        pairs = np.zeros(len(records), PAIR)
        pairs["main"], pairs["other"] = firsts["document"], records["document"]
        differences = np.bitwise_count(firsts["sketch"] ^ records["sketch"])
        yield pairs[(pairs["main"] != pairs["other"]) & (differences <= most)]


def buckets(bands: Iterable[NDArray]) -> Iterator[NDArray]:
    """Yield the documents of each bucket of several, in their order.

    Args:
        bands: sorted records of `band_records`, in blocks.
    """
    carried = np.zeros(0, BAND)  # the last bucket, which may go on
    for block in bands:
        records = np.concatenate([carried, block])
        *complete, carried = np.split(records, np.flatnonzero(np.diff(records["key"])) + 1)
        yield from (bucket["document"] for bucket in complete if len(bucket) > 1)
    if len(carried) > 1:
        yield carried["document"]


def split_blocks(pairs: Iterable[NDArray]) -> Iterator[NDArray]:
    """Yield pairs in blocks of as many as are compared at once."""
    for block in pairs:
        for start in range(0, len(block), _ITEM_PAIRS):
            yield block[start : start + _ITEM_PAIRS]
