"""Input of BERT or GPT for one or two texts, such as [CLS] A [SEP] B [SEP]: padded, with padding mask."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.tokenizer.special import encode_alone
from megatron.tokenizer.types.tokenizer import Tokenizer


def clean_text(text: str) -> str:
    """Turn each run of white space into one space, and remove the space before a full stop.

    Source: Megatron-LM, which replaces " . " three times, so that three of them may overlap. Spaces
    at either end stay.
    """
    text = re.sub(r"\s+", " ", text)
    for _ in range(3):
        text = text.replace(" . ", ". ")
    return text


class Packer(Protocol):
    """Pack the token ids of one or two texts into one row; one that is too long loses its end."""

    def pack(
        self, first: NDArray | Sequence[int], second: NDArray | Sequence[int] | None = None
    ) -> dict[str, NDArray]:
        """Return the row of `first`, followed by `second` unless that is None.

        Shapes: {"text", "types", "padding_mask": [length]} int64.
        """

    def is_cut(self, num_tokens: NDArray, *, is_pair: NDArray | bool) -> NDArray:
        """Whether rows of texts with so many tokens in all lose some of them."""


@dataclass(frozen=True)
class SegmentPacker:
    """Pack the token ids of one or two texts into one row of BERT.

    A row that is too long loses its end, whichever text that belongs to, and still ends in [SEP].

    Args:
        length: tokens of a row.
    """

    length: int
    cls: int
    sep: int
    pad: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, length: int) -> "SegmentPacker":
        """Return the packer with the special tokens of `tokenizer`.

        Raises:
            DataError: the tokenizer has no [CLS], [SEP] or [PAD].
        """
        special = tokenizer.special
        return cls(length, cls=special("cls"), sep=special("sep"), pad=special("pad"))

    def pack(
        self, first: NDArray | Sequence[int], second: NDArray | Sequence[int] | None = None
    ) -> dict[str, NDArray]:
        """See `Packer`."""
        ids = [self.cls, *first, self.sep]
        num_first = len(ids)
        is_cut = num_first + len(second if second is not None else ()) >= self.length
        if second is not None:
            ids.extend(second)
        if second is not None or is_cut:
            ids = [*ids[: self.length - 1], self.sep]
        text = np.full(self.length, self.pad)
        text[: len(ids)] = ids
        types = np.zeros(self.length, np.int64)
        if second is not None:
            # The last [SEP] has type 1 even if nothing else is left of the second text.
            types[min(num_first, len(ids) - 1) : len(ids)] = 1
        padding_mask = (np.arange(self.length) < len(ids)).astype(np.int64)
        return {"text": text, "types": types, "padding_mask": padding_mask}

    def is_cut(self, num_tokens: NDArray, *, is_pair: NDArray | bool) -> NDArray:
        """See `Packer`."""
        return num_tokens + 2 + is_pair > self.length


@dataclass(frozen=True)
class DecoderPacker:
    """Pack the token ids of one or two texts into one row of a GPT: A, or A EOD B.

    In front is the token that the tokenizer begins texts with, if it does.

    Args:
        length: tokens of a row.
        front: ids before the first text.
        eod: id that ends documents.
    """

    length: int
    front: tuple[int, ...]
    eod: int
    pad: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, length: int) -> "DecoderPacker":
        """Return the packer with the special tokens of `tokenizer`.

        Raises:
            DataError: the tokenizer has none that ends documents.
        """
        bos, eod = tokenizer.special_ids.get("bos"), tokenizer.eod
        front = () if bos is None or tokenizer.encode("")[:1] != [bos] else (bos,)
        return cls(length, front=front, eod=eod, pad=tokenizer.special_ids.get("pad", eod))

    def pack(
        self, first: NDArray | Sequence[int], second: NDArray | Sequence[int] | None = None
    ) -> dict[str, NDArray]:
        """See `Packer`."""
        pair = () if second is None else (self.eod, *second)
        ids = [*self.front, *first, *pair][: self.length]
        text = np.full(self.length, self.pad)
        text[: len(ids)] = ids
        padding_mask = (np.arange(self.length) < len(ids)).astype(np.int64)
        return {"text": text, "types": np.zeros_like(padding_mask), "padding_mask": padding_mask}

    def is_cut(self, num_tokens: NDArray, *, is_pair: NDArray | bool) -> NDArray:
        """See `Packer`."""
        return len(self.front) + num_tokens + is_pair > self.length


class EncodedTexts:
    """Token ids of many texts, each of them encoded once and without special tokens.

    Shapes: texts[i] -> [tokens of text i] int32; lengths [texts].
    """

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer):
        if tokenizer.encode(""):
            encode = encode_alone(tokenizer)
            rows = [encode(text) for text in texts]
            lengths = np.fromiter(map(len, rows), np.int64, len(rows))
            self._tokens = np.array([token for row in rows for token in row], np.int32)
        else:
            self._tokens, lengths = tokenizer.encode_array(texts)
        self.lengths: NDArray[np.int64] = lengths
        self._ends = np.concatenate([[0], lengths.cumsum()])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, i: int) -> NDArray:
        return self._tokens[self._ends[i] : self._ends[i + 1]]
