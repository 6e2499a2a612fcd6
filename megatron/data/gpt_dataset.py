"""Samples for language modelling: documents packed end to end and cut every seq_length tokens."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.data.index_cache import cached_sample_index
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.sample_index import plan_epochs
from megatron.data.splits import split_ranges
from megatron.errors import DataError


class GPTDataset:
    """Sample i is a pure function of the arguments: `seq_length + 1` tokens of packed documents.

    Nothing is put between documents; preprocessing appends the end-of-document token.

    Args:
        dataset: the corpus.
        documents: the part of the corpus to use, numbers of its sequences.
        num_samples: how many are wanted; the documents repeat until there are at least as many.
        cache_directory: where the sample index is kept; see `cached_sample_index`.

    Raises:
        DataError: `documents` hold less than one sample, or the corpus is damaged.

    Shapes: dataset[i] -> [seq_length + 1] int64.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        documents: range,
        *,
        num_samples: int,
        seq_length: int,
        seed: int,
        cache_directory: str | Path | None = None,
    ):
        self.dataset = dataset
        self.seq_length = seq_length
        num_tokens = int(dataset.sizes[documents.start : documents.stop].sum(dtype=np.int64))
        if num_tokens <= seq_length:
            raise DataError(
                f"{dataset.prefix}: documents {documents.start} to {documents.stop} hold "
                f"{num_tokens} tokens, one sample needs {seq_length + 1} (--seq-length + 1); "
                "use more text, a shorter --seq-length or another --split"
            )
        epochs = plan_epochs(num_tokens, num_samples=num_samples, seq_length=seq_length)
        self.index = cached_sample_index(
            dataset,
            documents,
            epochs,
            seq_length=seq_length,
            seed=seed,
            directory=cache_directory,
        )

    def __len__(self) -> int:
        return len(self.index.sample_order)

    def __getitem__(self, i: int) -> NDArray:
        j = int(self.index.sample_order[i])
        (first, offset), (last, end) = self.index.sample_starts[j : j + 2].tolist()
        documents = self.index.document_order[first : last + 1]
        starts = self.dataset.pointers[documents] // self.dataset.dtype.itemsize
        stops = starts + self.dataset.sizes[documents]
        stops[-1] = starts[-1] + end + 1
        starts[0] += offset
        tokens = self.dataset.tokens
        sample = np.empty(self.seq_length + 1, np.int64)
        filled = 0
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            sample[filled : filled + stop - start] = tokens[start:stop]
            filled += stop - start
        return sample


def build_splits(
    prefix: str | Path,
    *,
    split: str,
    num_samples: tuple[int, int, int],
    seq_length: int,
    seed: int,
    cache_directory: str | Path | None = None,
) -> tuple[GPTDataset | None, GPTDataset | None, GPTDataset | None]:
    """Return the training, validation and test datasets of one corpus.

    One is None where no sample is wanted, or where `split` leaves it without documents.

    Args:
        split: proportions of the documents; see `split_ranges`.
        num_samples: wanted for training, validation and test.

    Raises:
        DataError: the corpus is empty or damaged, or a part of it holds less than one sample.
        ConfigError: `split` is not proportions.
    """
    dataset = IndexedDataset(prefix)
    if not len(dataset):
        raise DataError(f"{prefix} has no documents: 0 tokens, one sample needs {seq_length + 1}")

    def part(documents: range, wanted: int) -> GPTDataset | None:
        if not wanted or not documents:
            return None
        return GPTDataset(
            dataset,
            documents,
            num_samples=wanted,
            seq_length=seq_length,
            seed=seed,
            cache_directory=cache_directory,
        )

    train, valid, test = split_ranges(split, len(dataset))
    return part(train, num_samples[0]), part(valid, num_samples[1]), part(test, num_samples[2])
