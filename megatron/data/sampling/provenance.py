"""Provenance: the documents and tokens that a sample, and so a training step, consists of."""

from dataclasses import dataclass
from typing import Protocol

from megatron.data.sampling.batch_sampler import SampleSource


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
