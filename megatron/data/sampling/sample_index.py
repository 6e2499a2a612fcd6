"""Sample index: the tokens of sample i, in Megatron's seeded order of documents and samples.

Documents are shuffled and laid end to end, epoch after epoch; the stream is cut into samples
that share one token with their neighbours; the samples are shuffled once more.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.common.progress import with_progress
from megatron.config.data.corpora import SampleOrder
from megatron.data.sampling.index_map import IndexMap

_CHUNK = 1 << 18  # documents looked at in one go, so that temporary arrays stay small

_SEPARATE_BELOW: Mapping[SampleOrder, float] = {"bigscience": 0.95, "megatron-core": 0.80}
"""Share of its samples below which the last epoch is shuffled by itself."""


@dataclass(frozen=True)
class Epochs:
    """Number of epochs over the documents, and of the samples they give."""

    num_epochs: int
    num_samples: int  # in all epochs together
    num_early_samples: int  # shuffled among themselves, before those that follow

    @property
    def has_separate_last(self) -> bool:
        """Whether the last epoch is shuffled apart, because little of it is wanted."""
        return self.num_early_samples < self.num_samples


@dataclass(frozen=True)
class SampleIndex:
    """The three maps from a sample's number to its tokens.

    Sample i is number j = sample_order[i] in the stream. It starts at position sample_starts[j]
    and ends with the token at sample_starts[j + 1], which the next one shares.

    Shapes: document_order [epochs * documents], document numbers; sample_starts
        [samples + 1, 2], index in document_order and token in that document;
        sample_order [samples].
    """

    document_order: IndexMap
    sample_starts: IndexMap
    sample_order: IndexMap


def plan_epochs(
    tokens_per_epoch: int,
    *,
    num_samples: int,
    seq_length: int,
    sample_order: SampleOrder = "bigscience",
) -> Epochs:
    """Return the fewest epochs that hold `num_samples` samples.

    The last epoch is shuffled by itself when few of its samples are needed: mixed into the
    other epochs, it would show part of the documents once more than the rest.

    Source: BigScience's Megatron-DeepSpeed, where few is less than 95% of an epoch's samples, and
        Megatron Core, where it is less than 80%.
    """
    num_epochs = max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))
    all_samples = (num_epochs * tokens_per_epoch - 1) // seq_length
    if num_epochs == 1:
        return Epochs(1, all_samples, all_samples)
    early_samples = ((num_epochs - 1) * tokens_per_epoch - 1) // seq_length
    samples_per_epoch = (tokens_per_epoch - 1) // seq_length
    few = int(_SEPARATE_BELOW[sample_order] * samples_per_epoch)
    is_separate = num_samples - early_samples < few
    return Epochs(num_epochs, all_samples, early_samples if is_separate else all_samples)


def build_sample_index(
    sizes: NDArray, documents: range, epochs: Epochs, *, seq_length: int, seed: int
) -> SampleIndex:
    """Build the maps over `documents` of a corpus.

    Args:
        sizes: tokens of every document of the corpus.
        epochs: made by `plan_epochs` from the tokens in `documents`.

    Shapes: sizes [at least documents.stop] int32.
    Randomness: one generator seeded with `seed`, for the documents and then for the samples.
    """
    rng = np.random.RandomState(seed)
    document_order = _document_order(documents, epochs, rng)
    sample_order = _sample_order(epochs, rng)
    sample_starts = _sample_starts(
        _compact(sizes[documents.start : documents.stop]),
        document_order,
        first_document=documents.start,
        num_samples=epochs.num_samples,
        seq_length=seq_length,
    )
    return SampleIndex(document_order, sample_starts, sample_order)


def _document_order(documents: range, epochs: Epochs, rng: np.random.RandomState) -> NDArray:
    dtype = _signed_dtype(documents.stop)
    order = np.empty(epochs.num_epochs * len(documents), np.int64)
    one_epoch = np.arange(documents.start, documents.stop, dtype=dtype)
    order.reshape(epochs.num_epochs, -1)[:] = one_epoch
    num_early = len(order) - len(documents) * epochs.has_separate_last
    return _shuffle(order, num_early, rng, dtype)


def _sample_starts(
    sizes: NDArray,
    document_order: NDArray,
    *,
    first_document: int,
    num_samples: int,
    seq_length: int,
) -> NDArray:
    """Find the document that holds token k * seq_length of the stream, for every k."""
    starts = np.empty((num_samples + 1, 2), _signed_dtype(len(document_order)))
    row = 0
    tokens_before = 0
    chunks = range(0, len(document_order), _CHUNK)
    for first in with_progress(chunks, "sample index", len(chunks), "parts"):
        # take() is twice as fast as indexing, and a sum of 64-bit numbers six times.
        chunk = document_order[first : first + _CHUNK] - first_document
        chunk_sizes = sizes.take(chunk).astype(np.int64)
        ends = tokens_before + np.cumsum(chunk_sizes)
        tokens_before = int(ends[-1])
        next_row = min((tokens_before - 1) // seq_length, num_samples) + 1
        tokens = np.arange(row, next_row, dtype=np.int64) * seq_length
        indices = np.searchsorted(ends, tokens, side="right")
        starts[row:next_row, 0] = first + indices
        starts[row:next_row, 1] = tokens - (ends[indices] - chunk_sizes[indices])
        row = next_row
    # Megatron starts at the first document even if that one is empty.
    starts[0] = 0
    return starts


def _compact(sizes: NDArray) -> NDArray:
    """Return a copy for random access: aligned, unlike the mapped file, and as small as can be."""
    fits = sizes.max(initial=0) <= np.iinfo(np.uint16).max
    return np.array(sizes, dtype=np.uint16 if fits else np.int32)


def _sample_order(epochs: Epochs, rng: np.random.RandomState) -> NDArray:
    fits = epochs.num_samples < np.iinfo(np.uint32).max - 1
    dtype = np.uint32 if fits else np.int64
    return _shuffle(np.arange(epochs.num_samples), epochs.num_early_samples, rng, dtype)


def _shuffle(
    order: NDArray[np.int64], num_early: int, rng: np.random.RandomState, dtype: type[np.integer]
) -> NDArray:
    """Return `order` as `dtype`, in its memory: the first `num_early` shuffled, then the rest."""
    # Numpy shuffles numbers of 8 bytes faster than other sizes, though in the same way.
    rng.shuffle(order[:num_early])
    if num_early < len(order):
        rng.shuffle(order[num_early:])
    if np.dtype(dtype) == order.dtype:
        return order
    length = len(order)
    narrow = order.view(dtype)[:length]
    for first in range(0, length, _CHUNK):
        narrow[first : first + _CHUNK] = order[first : first + _CHUNK]
    del narrow
    order.resize((length + 1) // 2, refcheck=False)  # the other half goes back to the system
    return order.view(dtype)[:length]


def _signed_dtype(count: int) -> type[np.signedinteger]:
    return np.int32 if count <= np.iinfo(np.int32).max else np.int64
