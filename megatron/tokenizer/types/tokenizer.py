"""Tokenizer interface that every tokenizer type implements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.common.errors import DataError

Role = Literal["eod", "bos", "eos", "unk", "pad", "cls", "sep", "mask"]


@dataclass(frozen=True)
class Vocabulary:
    """All that makes two tokenizers the same, whatever files they come from.

    Args:
        tokens: text of each id; "" for an id without a token, empty if there are no texts.
        rules: how characters are joined to tokens: merges in order, or scores.
    """

    tokens: Sequence[str]
    rules: str


class Tokenizer(Protocol):
    """Text to token ids and back.

    A class that inherits from this must define `name`, `vocab_size`, `special_ids`, `encode`,
    `decode` and `vocabulary`; the rest follows from them.
    """

    name: str  # the name in messages, such as its file
    vocab_size: int  # ids, before any padding: every id is less than this
    special_ids: Mapping[Role, int]  # only those that the vocabulary has
    extra_ids: Sequence[int] = ()  # of <extra_id_0>, <extra_id_1> and so on
    hint: str = ""  # how to give it the special tokens that it lacks

    @property
    def eod(self) -> int:
        """Id of the token that ends a document.

        Raises:
            DataError: the vocabulary has no such token.
        """
        return self.special("eod")

    def special(self, role: Role) -> int:
        """Return the id of the special token of this role.

        Raises:
            DataError: the vocabulary has no such token.
        """
        if role not in self.special_ids:
            present = ", ".join(self.special_ids) or "none"
            raise DataError(
                f"the tokenizer {self.name} has no token for {role}, which is needed here; "
                f"it has: {present}{self.hint}"
            )
        return self.special_ids[role]

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`.

        Raises:
            DataError: the text cannot be written with this vocabulary.
        """

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, as `encode` does."""
        return [self.encode(text) for text in texts]

    def encode_array(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the ids of all texts back to back, and how many ids each text has.

        This is the way to encode many texts: a fast backend makes no Python object for a token.
        The ids of text i are `tokens[ends[i] - lengths[i] : ends[i]]`, `ends = lengths.cumsum()`.

        Raises:
            DataError: one of the texts cannot be encoded; `encode` raises it for that text alone.

        Shapes: tokens [sum of lengths] int32, lengths [number of texts] int64.
        """
        rows = self.encode_batch(texts)
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum())), lengths

    def encode_ended(
        self, texts: Sequence[str], end: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the result of `encode_array`, with the id `end` after the ids of each text."""
        return with_ends(*self.encode_array(texts), end)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD."""

    def gives_back(self, ids: NDArray, text: str) -> bool:
        """Whether `ids`, non-negative integers, are the same text as `text` when decoded."""
        return self.decode(ids.tolist()) == text

    def vocabulary(self) -> Vocabulary:
        """Return the properties that this tokenizer is compared by."""


def with_ends(
    tokens: NDArray[np.int32], lengths: NDArray[np.int64], end: int
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the ids of texts with `end` after each text, and the number of ids of each text."""
    return np.insert(tokens, lengths.cumsum(), end), lengths + 1


def no_tokens(name: str, text: str, reason: object) -> DataError:
    """Return the error of a text that cannot be encoded."""
    if has_half_a_surrogate_pair(text):
        reason = "it holds half of a surrogate pair, which is not a character"
    return DataError(f"{name}: no tokens for the text {text[:80]!r}: {reason}")


def has_half_a_surrogate_pair(text: str) -> bool:
    """Whether `text` holds a lone surrogate, which JSON can escape but UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def texts_by_id(vocab: Mapping[str, int]) -> list[str]:
    """Return the text of each id; "" where there is none."""
    texts = [""] * (max(vocab.values(), default=-1) + 1)
    for text, i in vocab.items():
        texts[i] = text
    return texts
