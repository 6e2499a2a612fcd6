"""Provenance: the documents and tokens that a sample, and so a training step, consists of; its text."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron.config.optimization.batch_size import BatchPlan
from megatron.data.sampling.batch_sampler import Sample, SampleSource
from megatron.tokenizer.types.tokenizer import Tokenizer


@dataclass(frozen=True)
class Piece:
    """A part of one document."""

    document: int  # number of the sequence in its token file
    start: int  # first token, counted in the document
    stop: int  # after the last


@dataclass(frozen=True)
class Origin:
    """The pieces of documents that make a sample, in order."""

    prefix: str
    sample: int  # number in the data set of these token files
    pieces: tuple[Piece, ...]


class TracedSource(SampleSource, Protocol):
    """A source of samples with known provenance in token files."""

    def origin(self, i: int, /) -> Origin:
        """Return the token spans of sample i on disk."""


class OneToOne:
    """Base of views whose sample i is made of sample i of another data set.

    Args:
        dataset: that data set, blended and ordered as it is trained on.
    """

    def __init__(self, dataset: TracedSource):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def origin(self, i: int) -> Origin:
        """Return the token spans of sample i on disk."""
        return self.dataset.origin(i)


def lines_of_step(
    first: int,
    last: int,
    *,
    sources: TracedSource,
    texts: SampleSource,
    tokenizer: Tokenizer,
    batch: BatchPlan,
    most: int | None = None,
) -> Iterator[str]:
    """Yield the reader, the origin and the text of each sample of a step.

    Args:
        first: number of the step's first sample; `last` is one past its last one.
        sources: the data set as it lies on disk.
        texts: the data set as it is trained on.
        most: characters of a text; all when None.
    """
    for i in range(first, last):
        yield f"  sample {i} | {reader(batch, i - first)} | {describe(sources.origin(i))}"
        for text in texts_of(texts[i], tokenizer):
            yield f"    {text[:most]!r}"


def reader(batch: BatchPlan, index: int) -> str:
    """Return the replica and micro-batch that read the sample at `index` of a step."""
    turn, within = divmod(index, batch.micro_batch_size * batch.data_parallel_size)
    return f"replica {within // batch.micro_batch_size} micro-batch {turn}"


def describe(origin: Origin) -> str:
    """Return the origin of a sample: document[first token:token after the last]."""
    pieces = " ".join(f"{piece.document}[{piece.start}:{piece.stop}]" for piece in origin.pieces)
    return f"{origin.prefix} sample {origin.sample} | documents {pieces}"


def tokens_of(sample: Sample) -> dict[str, list[int]]:
    """Return the network inputs of a sample without padding, by the name of each part.

    The only part of a decoder's sample has the name "".
    """
    if "text_enc" in sample:
        return {
            "encoder": sample["text_enc"][: int(sample["enc_length"])].tolist(),
            "decoder": sample["text_dec"][: int(sample["dec_length"])].tolist(),
        }
    if "padding_mask" in sample:
        return {"": sample["text"][: int(sample["padding_mask"].sum())].tolist()}
    return {"": sample["tokens"].tolist()}


def texts_of(sample: Sample, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield each part of a sample as text.

    Of masked ones, each token to be predicted is followed by the predicted one in parentheses:
    `the [MASK](cat) sat` is a masked token, `the cat(cat) sat` one that stays, `the dog(cat) sat`
    one that another takes the place of.
    """
    for name, tokens in tokens_of(sample).items():
        if "padding_mask" in sample:
            text = " ".join(_with_masks(tokens, sample["labels"].tolist(), tokenizer))
        else:
            text = tokenizer.decode(tokens)
        yield f"{name}: {text}" if name else text


def _with_masks(tokens: list[int], labels: list[int], tokenizer: Tokenizer) -> Iterator[str]:
    start = 0
    for position in np.flatnonzero(np.array(labels[: len(tokens)]) >= 0).tolist():
        if position > start:
            yield tokenizer.decode(tokens[start:position])
        shown, predicted = ([tokens[position]], [labels[position]])
        yield f"{tokenizer.decode(shown)}({tokenizer.decode(predicted)})"
        start = position + 1
    if start < len(tokens):
        yield tokenizer.decode(tokens[start:])
