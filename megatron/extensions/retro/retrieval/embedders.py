"""Embedders of Retro: text to vectors, whose nearest neighbors are retrieved."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from megatron.tokenizer.build import build_tokenizer

_BATCH = 1000  # texts, whose sums are in memory together


class TokenCounter(Protocol):
    """Counts the tokens of texts as an embedder reads them; a text without any has no vector."""

    def count(self, texts: Sequence[str]) -> Sequence[int]:
        """Return the number of tokens of each text."""


class Embedder(Protocol):
    """Turns texts into vectors.

    Args:
        width: features of a vector.
    """

    width: int

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors of texts.

        Shapes: -> [texts, width] float32.
        """


class WordCounter:
    """Counts words: the tokens of a `HashedEmbedder`."""

    def count(self, texts: Sequence[str]) -> list[int]:
        """Return the number of words of each text."""
        return [len(text.split()) for text in texts]


class PieceCounter:
    """Counts the tokens of a tokenizer, without special tokens.

    Args:
        arguments: of `build_tokenizer`.
    """

    def __init__(self, arguments: Mapping[str, Any]):
        self._tokenizer = build_tokenizer(**arguments)

    def count(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text."""
        return [*map(len, self._tokenizer.encode_batch(texts))]


class HashedEmbedder:
    """Feature hashing: counts of words and pairs of words, signed, by their hash; of length 1.

    Needs no weights, and texts that share words are near each other. A text without a word becomes
    zeros.

    Source: arXiv:0902.2206, equation 2.
    """

    def __init__(self, width: int):
        self.width = width

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors of texts. Shapes: -> [texts, width] float32."""
        batches = [texts[first : first + _BATCH] for first in range(0, len(texts), _BATCH)]
        rows = [self._embed_batch(batch) for batch in batches]
        return np.concatenate([np.empty((0, self.width), np.float32), *rows])

    def _embed_batch(self, texts: Sequence[str]) -> NDArray[np.float32]:
        hashes = [[xxh3_64_intdigest(each.encode()) for each in _features(text)] for text in texts]
        rows = np.repeat(np.arange(len(texts)), [len(each) for each in hashes])
        bits = np.fromiter(chain.from_iterable(hashes), np.uint64, len(rows))
        # The highest bit is the sign, so that collisions cancel on average.
        signs = np.where(bits >> np.uint64(63), -1.0, 1.0)
        cells = rows * self.width + (bits % np.uint64(self.width)).astype(np.int64)
        size = len(texts) * self.width
        sums = np.bincount(cells, signs, size).reshape(len(texts), self.width)
        norms = np.sqrt((sums * sums).sum(1, keepdims=True))
        return (sums / np.maximum(norms, 1.0)).astype(np.float32)


def _features(text: str) -> Iterator[str]:
    words = text.lower().split()
    yield from words
    for first, second in pairwise(words):
        yield f"{first} {second}"
