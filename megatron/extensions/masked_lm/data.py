"""Consecutive sentences of a document, as samples of BERT and T5 before they are masked."""

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.common.errors import DataError
from megatron.common.registry import KINDS
from megatron.config.data.corpora import DataPlan
from megatron.data.datasets.kinds import Kind
from megatron.data.sampling.index_cache import cached_maps, cached_sizes
from megatron.data.sampling.index_size import sentence_mapping_room
from megatron.data.sampling.provenance import Origin, Piece
from megatron.data.token_files.indexed_dataset import IndexedDataset
from megatron.extensions.masked_lm.data_mapping import (
    NoUsableDocument,
    build_sentence_mapping,
    has_usable_document,
)
from megatron.extensions.masked_lm.flags import SentencePlan

log = logging.getLogger(__name__)


class SentenceDataset:
    """Sample i, a pure function of the arguments, is a run of sentences of one document.

    Args:
        dataset: a corpus whose sequences are sentences.
        documents: the part of the corpus to use.
        num_samples: how many are wanted; the documents repeat until there are at least as many.
        seq_length: of a padded sample, with its special tokens.
        cache_directory: where the sentence mapping is kept; see `cached_maps`.
        sentences: how documents are cut.

    Raises:
        DataError: no document gives a sample, or the corpus is damaged.

    Shapes: dataset[i] -> {"tokens": [tokens], "sizes": [sentences], "target_length": [], "index":
        []} int64: tokens of each sentence; the length to which the sample is cut; i itself, which
        seeds its masks.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        documents: range,
        *,
        num_samples: int,
        seq_length: int,
        seed: int,
        sentences: SentencePlan,
        cache_directory: str | Path | None = None,
    ):
        self.dataset = dataset
        starts = dataset.document_starts[documents.start : documents.stop + 1]
        span = range(int(starts[0]), int(starts[-1]))
        self.num_tokens = cached_sizes(dataset, span, directory=cache_directory).num_tokens
        max_length = seq_length - sentences.num_special
        if seed <= 0:
            raise DataError(f"--seed {seed} must be above 0 for samples of sentences")

        _warn_if_cut(dataset, documents, span, self.num_tokens, max_length)

        def build() -> dict[str, NDArray]:
            started_at = time.monotonic()
            try:
                mapping = build_sentence_mapping(
                    dataset.sizes,
                    starts,
                    num_samples=num_samples,
                    max_length=max_length,
                    short_seq_prob=sentences.short_seq_prob,
                    seed=seed,
                    min_sentences=sentences.min_sentences,
                )
            except NoUsableDocument as error:
                raise DataError(_no_sample(dataset, documents, sentences, error)) from error
            log.info(
                f"built the sentence mapping of {dataset.prefix}: {len(documents)} documents, "
                f"{len(mapping.epoch_ends)} epochs, {len(mapping.rows)} samples, "
                f"{time.monotonic() - started_at:.1f} s"
            )
            return dict(vars(mapping))

        maps = cached_maps(
            f"sentences {documents} {num_samples} {max_length} {sentences.short_seq_prob!r} {seed} "
            f"{sentences.min_sentences} {dataset.index_digest}",
            {"rows": (None, 3), "epoch_ends": (None,)},
            build,
            sentence_mapping_room(
                dataset.prefix,
                num_samples,
                documents=len(documents),
                sentences=len(span),
                tokens=self.num_tokens,
                max_length=max_length,
            ),
            prefix=dataset.prefix,
            directory=cache_directory,
        )
        self._rows, self._epoch_ends = maps["rows"], maps["epoch_ends"]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> dict[str, NDArray]:
        self.dataset.require_whole_index()
        first, stop, target_length = self._rows[i].tolist()
        sizes = self.dataset.sizes[first:stop].astype(np.int64)
        start = int(self.dataset.token_starts(np.array([first]))[0])
        tokens = self.dataset.tokens[start : start + int(sizes.sum())].astype(np.int64)
        return {
            "tokens": tokens,
            "sizes": sizes,
            "target_length": np.array(target_length, np.int64),
            "index": np.array(i, np.int64),
        }

    def epochs(self, num_samples: int) -> float:
        """Return the number of epochs that `num_samples` samples take."""
        return num_samples * len(self._epoch_ends) / len(self)

    def size_for(self, num_samples: int) -> int:
        """Return the number of samples in as many complete epochs as `num_samples` need.

        That many itself if it is more than there are here: how many more is not known.
        """
        ends = self._epoch_ends[:]
        epoch = int(np.searchsorted(ends, num_samples))
        return int(ends[epoch]) if epoch < len(ends) else num_samples

    def origin(self, i: int) -> Origin:
        """Return the sentences of sample i on disk, complete, as they are before it is cut."""
        first, stop, _ = self._rows[i].tolist()
        sizes = self.dataset.sizes[first:stop].tolist()
        pieces = (Piece(first + k, 0, size) for k, size in enumerate(sizes))
        return Origin(self.dataset.prefix, i, tuple(pieces))


def _warn_if_cut(
    dataset: IndexedDataset, documents: range, span: range, num_tokens: int, max_length: int
) -> None:
    """Warn where documents are not split into sentences and lose tokens to the sample length."""
    if len(span) == len(documents) and num_tokens > max_length * len(documents):
        log.warning(
            f"{dataset.prefix}: each document is one sequence, of "
            f"{num_tokens // len(documents)} tokens on average: tokens after the first "
            f"{max_length} are in no sample; tools/preprocess_data.py --split-sentences makes "
            "token files of sentences"
        )


def _no_sample(
    dataset: IndexedDataset, documents: range, sentences: SentencePlan, error: NoUsableDocument
) -> str:
    remedy = "make the token files with tools/preprocess_data.py --split-sentences"
    if sentences.min_sentences > 1:
        remedy += (
            ", or train with --bert-no-binary-head, which takes documents of a single sentence"
        )
    return (
        f"{dataset.prefix}: none of the documents {documents.start} to {documents.stop} gives a "
        f"sample: {error} (samples need {sentences.min_sentences}); {remedy}"
    )


@KINDS.register("sentences")
class Sentences(Kind):
    """Documents of sentences, which are cut between sentences."""

    dataset = SentenceDataset
    repeats_documents = True

    def rules(self, plan: DataPlan, *, is_validation: bool) -> dict[str, Any]:
        """Return how documents are cut."""
        return {"sentences": plan.cut}

    def lack(
        self,
        tokens: IndexedDataset,
        documents: range,
        plan: DataPlan,
        *,
        seq_length: int,
        is_validation: bool,
    ) -> str:
        """Return how many sentences no document has, if none has as many as a sample needs."""
        fewest = plan.cut.min_sentences
        starts = tokens.document_starts[documents.start : documents.stop + 1]
        if has_usable_document(tokens.sizes, starts, fewest):
            return ""
        return f"no document of {fewest} or more sentences"
