"""What everything else may ask of a tokenizer."""

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, before any padding."""

    @property
    def eod(self) -> int:
        """Id of the token that ends a document.

        Raises:
            DataError: the vocabulary has no such token.
        """

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`.

        Raises:
            DataError: the text cannot be written with this vocabulary.
        """

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, as `encode` does."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD."""
