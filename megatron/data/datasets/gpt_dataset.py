"""Samples for language modelling: documents packed end to end and cut every seq_length tokens."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.common.errors import DataError
from megatron.common.registry import KINDS
from megatron.config.data.corpora import DataPlan, SampleOrder
from megatron.data.datasets.kinds import Kind
from megatron.data.sampling.index_cache import cached_sample_index, cached_sizes
from megatron.data.sampling.provenance import Origin, Piece
from megatron.data.sampling.sample_index import Epochs, plan_epochs
from megatron.data.token_files.indexed_dataset import IndexedDataset


class GPTDataset:
    """GPT dataset: sample i, a pure function of the arguments, is `seq_length + 1` packed tokens.

    Nothing is put between documents; preprocessing appends the end-of-document token.

    Args:
        dataset: the corpus.
        documents: the part of the corpus to use, numbers of its sequences.
        num_samples: how many are wanted; the documents repeat until there are at least as many.
        cache_directory: where the sample index is kept; see `cached_maps`.
        sample_order: whose rule shuffles the last epoch; see `plan_epochs`.
        repeats_short: whether documents of less than one sample repeat within it.

    Raises:
        DataError: `documents` hold less than one sample and do not repeat, or the corpus is damaged.

    Shapes: dataset[i] -> {"tokens": [seq_length + 1] int64}.
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
        sample_order: SampleOrder = "bigscience",
        repeats_short: bool = False,
    ):
        self.dataset = dataset
        self.seq_length = seq_length
        self._sample_order = sample_order
        num_tokens = cached_sizes(dataset, documents, directory=cache_directory).num_tokens
        self.num_tokens = num_tokens
        if num_tokens < (1 if repeats_short else seq_length + 1):
            raise DataError(
                f"{dataset.prefix}: documents {documents.start} to {documents.stop} hold "
                f"{num_tokens} tokens, one sample needs {seq_length + 1} (--seq-length + 1); "
                "use more text, a shorter --seq-length or another --split"
            )
        epochs = self._plan_epochs(num_samples)
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

    def __getitem__(self, i: int) -> dict[str, NDArray]:
        self.dataset.require_whole_index()
        (first, offset), (last, end) = self._ends(i)
        if first == last:
            document = int(self.index.document_order[first])
            tokens = self.dataset.get(document, offset, end - offset + 1)
            return {"tokens": tokens.astype(np.int64)}
        _, starts, stops = self._pieces(first, offset, last, end)
        return {"tokens": self.dataset.tokens.gather(starts, stops).astype(np.int64)}

    def epochs(self, num_samples: int) -> float:
        """Return the number of epochs that `num_samples` samples take."""
        return num_samples * self.seq_length / self.num_tokens

    def size_for(self, num_samples: int) -> int:
        """Return the number of samples in as many complete epochs as `num_samples` need."""
        return self._plan_epochs(num_samples).num_samples

    def origin(self, i: int) -> Origin:
        """Return the token spans of sample i on disk."""
        (first, offset), (last, end) = self._ends(i)
        documents, starts, stops = self._pieces(first, offset, last, end)
        begins = self.dataset.token_starts(documents).tolist()
        pieces = zip(documents.tolist(), begins, starts, stops, strict=True)
        return Origin(
            self.dataset.prefix,
            i,
            tuple(
                Piece(document, start - begin, stop - begin)
                for document, begin, start, stop in pieces
                if start < stop
            ),
        )

    def _plan_epochs(self, num_samples: int) -> Epochs:
        return plan_epochs(
            self.num_tokens,
            num_samples=num_samples,
            seq_length=self.seq_length,
            sample_order=self._sample_order,
        )

    def _ends(self, i: int) -> list[list[int]]:
        """Return index of the document and token in it, where sample i starts and where it ends."""
        j = int(self.index.sample_order[i])
        return self.index.sample_starts[j : j + 2].tolist()

    def _pieces(
        self, first: int, offset: int, last: int, end: int
    ) -> tuple[NDArray, list[int], list[int]]:
        """Return documents, and from which to which token of the file each is in a sample.

        Args:
            first: index of its first document in the order.
            offset: its first token in that document.
            last: index of its last document.
            end: its last token in that.
        """
        dataset = self.dataset
        documents = self.index.document_order[first : last + 1]
        first_tokens = dataset.token_starts(documents)
        starts = first_tokens.tolist()
        stops = (first_tokens + dataset.sizes[documents]).tolist()
        stops[-1] = starts[-1] + end + 1
        starts[0] += offset
        return documents, starts, stops


@KINDS.register("documents")
class Documents(Kind):
    """Documents that are packed one after the other and cut."""

    dataset = GPTDataset
    repeats_documents = True

    def rules(self, plan: DataPlan, *, is_validation: bool) -> dict[str, Any]:
        """Return the program whose order samples have, and whether short corpora repeat."""
        repeats = {"repeats_short": True} if _repeats_short(plan, is_validation) else {}
        return {"sample_order": plan.sample_order, **repeats}

    def lack(
        self,
        tokens: IndexedDataset,
        documents: range,
        plan: DataPlan,
        *,
        seq_length: int,
        is_validation: bool,
    ) -> str:
        """Return how many tokens there are, if these are too few for a sample."""
        sizes = cached_sizes(tokens, documents, directory=plan.cache_path or None)
        if sizes.num_tokens > (0 if _repeats_short(plan, is_validation) else seq_length):
            return ""
        return f"{sizes.num_tokens} tokens of the {seq_length + 1} of one sample"


def _repeats_short(plan: DataPlan, is_validation: bool) -> bool:
    """Whether documents of less than one sample repeat; a plugin's datasets decide otherwise."""
    return is_validation and plan.sample_order == "megatron-core" and not plan.dataset
