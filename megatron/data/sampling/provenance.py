"""Provenance: the documents and tokens that a sample, and so a training step, consists of."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from megatron.config.optimization.batch_size import BatchPlan
from megatron.data.sampling.batch_sampler import SampleSource
from megatron.data.sampling.sample_text import texts_of
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
        first: number of the step's first sample; `last` is behind its last one.
        sources: the data set as it lies on disk.
        texts: the data set as it is trained on.
        most: characters of a text; all when None.
    """
    for i in range(first, last):
        yield f"  sample {i} | {reader(batch, i - first)} | {described(sources.origin(i))}"
        for text in texts_of(texts[i], tokenizer):
            yield f"    {text[:most]!r}"


def reader(batch: BatchPlan, index: int) -> str:
    """Return the replica and micro-batch that read the sample at `index` of a step."""
    turn, within = divmod(index, batch.micro_batch_size * batch.data_parallel_size)
    return f"replica {within // batch.micro_batch_size} micro-batch {turn}"


def described(origin: Origin) -> str:
    """Return the origin of a sample: document[first token:token after the last]."""
    pieces = " ".join(f"{piece.document}[{piece.start}:{piece.stop}]" for piece in origin.pieces)
    return f"{origin.prefix} sample {origin.sample} | documents {pieces}"
