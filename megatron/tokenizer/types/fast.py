"""A fast implementation of byte-level BPE, used where it agrees with the reference one."""

import json
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain, zip_longest
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend

from megatron.common.errors import ConfigError, install
from megatron.tokenizer.types.adversarial import adversarial_texts
from megatron.tokenizer.types.tokenizer import Tokenizer, Vocabulary, with_ends

log = logging.getLogger(__name__)

Ids = TypeVar("Ids")

# It does not begin as it ends, so that none can be made of the end of a text and a part of it.
SEPARATOR = "\x1e<|the next text|>\x1d"
_SEPARATOR_BYTES = SEPARATOR.encode()
_SAMPLED_IDS = 2000  # ids of the vocabulary whose texts are part of the comparison

# How BLOOM cuts words, for the tokenizers library, and the pieces for Python: a word with the space
# before it, or all between two words.
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
_BETWEEN = r"(|.,!?…。，、।۔،)\t-\r\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_PIECE = re.compile(f" ?[^{_BETWEEN}]+|[{_BETWEEN}]+?(?= ?[^{_BETWEEN}])|[{_BETWEEN}]+")


class FastTokenizer(Tokenizer):
    """The ids of `reference`, found in a faster way if that gives the same ids.

    Whether it does is found out when a text is first encoded, on `adversarial_texts` and on
    texts of the vocabulary itself: a program that never encodes does not pay for it. It encodes
    on the calling thread only, so that processes side by side do not fight for cores.

    Args:
        reference: a tokenizer with the attribute `backend`.
        must_be_fast: find out at once, and let a difference be an error instead of a message.

    Raises:
        ConfigError: `must_be_fast`, but it is not.
    """

    def __init__(self, reference: Tokenizer, *, must_be_fast: bool = False):
        self.reference = reference
        self.name = reference.name
        self.hint = reference.hint
        self.vocab_size = reference.vocab_size
        self.special_ids = reference.special_ids
        self.extra_ids = reference.extra_ids
        self._must_be_fast = must_be_fast
        self._encoder: FastEncoder | None = None
        self._is_decided = False
        self._vocabulary: Vocabulary | None = None
        self._decodes_alike: bool | None = None  # None: not yet known
        if must_be_fast:
            self._decide()

    @property
    def is_fast(self) -> bool:
        """Whether another than the reference encodes."""
        return self._decide() is not None

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`."""
        return self._encode(lambda encoder: encoder.encode(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text."""
        if self._decide() is None:
            return self.reference.encode_batch(texts)
        return [self.encode(text) for text in texts]

    def encode_array(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the ids of all texts back to back, and how many ids each text has."""
        return self._encode(lambda encoder: encoder.encode_array(texts))

    def encode_ended(
        self, texts: Sequence[str], end: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the result of `encode_array`, with the id `end` after the ids of each text."""
        return self._encode(lambda encoder: encoder.encode_ended(texts, end))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""
        return self.reference.decode(ids)

    def gives_back(self, ids: NDArray, text: str) -> bool:
        """Whether `ids`, non-negative integers, are the same text as `text` when decoded.

        gigatoken's decoding may find them equal; only the reference's decides that they differ.
        """
        encoder = self._decide()
        if encoder is not None:
            if self._decodes_alike is None:
                self._decodes_alike = decodes_alike(self.reference, encoder)
            if self._decodes_alike and encoder.decode(ids) == text.encode():
                return True
        return super().gives_back(ids, text)

    def vocabulary(self) -> Vocabulary:
        """Return the properties that the reference is compared by."""
        if self._vocabulary is None:  # kept, since it takes longer than encoding a megabyte
            self._vocabulary = self.reference.vocabulary()
        return self._vocabulary

    def _encode(self, encode: "Callable[[Tokenizer | FastEncoder], Ids]") -> Ids:
        """Return the result of `encode` of the fast encoder, or of the reference if that fails."""
        encoder = self._decide()
        if encoder is not None:
            with suppress(Exception):  # of any type; the reference reports errors in a text
                return encode(encoder)
        return encode(self.reference)

    def _decide(self) -> "FastEncoder | None":
        if not self._is_decided:
            encoder = load_fast(self.reference)
            if isinstance(encoder, FastEncoder):
                self._encoder = encoder
            elif self._must_be_fast:
                raise ConfigError(f"--tokenizer-backend fast: {encoder}")
            else:
                log.info(f"tokenizer {self.name}: the slower reference encodes, because {encoder}")
            self._is_decided = True
        return self._encoder


class FastEncoder:
    """gigatoken, with the ids that the reference puts before and after every text.

    Many texts are encoded as one, with a token between them that no text holds: that is faster
    than a list of them, and the token's index becomes the one of the id that ends a document. A
    text that does hold it raises ValueError.

    Args:
        tokenizer_json: a tokenizer in the JSON format of the `tokenizers` library.
    """

    library = "gigatoken"

    def __init__(self, tokenizer_json: str):
        from gigatoken import Tokenizer as Gigatoken

        self.joins = True  # False: the texts are given as a list
        try:
            with_separator, self._separator = _with_separator(tokenizer_json)
            self._gigatoken = Gigatoken.from_json(with_separator)
        except Exception:  # the library defines no exception type, and may not take the token
            self.joins, self._separator = False, -1
            self._gigatoken = Gigatoken.from_json(tokenizer_json)
        self._prefix = np.array([], np.int32)
        self._suffix = np.array([], np.int32)

    def add_affixes(self, reference: Tokenizer) -> None:
        """Find the ids that `reference` adds before and after a text, if any."""
        inner, full = self.encode("a"), reference.encode("a")
        for start in range(len(full) - len(inner) + 1):
            if full[start : start + len(inner)] == inner:
                self._prefix = np.array(full[:start], np.int32)
                self._suffix = np.array(full[start + len(inner) :], np.int32)
                return

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`."""
        ids = self._gigatoken.encode(text).tolist()
        if self._separator in ids:
            raise ValueError(f"the text holds {SEPARATOR!r}")
        return [*self._prefix.tolist(), *ids, *self._suffix.tolist()]

    def encode_array(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the ids of all texts back to back, and how many ids each text has."""
        if not texts:
            return np.array([], np.int32), np.array([], np.int64)
        tokens, lengths = self._join(texts) if self.joins else self._lists(texts)
        if self.joins:
            tokens, lengths = tokens[tokens != self._separator], lengths - 1
        if self._prefix.size or self._suffix.size:
            starts = np.cumsum(lengths) - lengths
            tokens = _with_affixes(tokens, starts, lengths, self._prefix, self._suffix)
            lengths = lengths + (self._prefix.size + self._suffix.size)
        return tokens, lengths

    def encode_ended(
        self, texts: Sequence[str], end: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the result of `encode_array`, with the id `end` after the ids of each text."""
        if not texts or not self.joins or self._prefix.size or self._suffix.size:
            return with_ends(*self.encode_array(texts), end)
        tokens, lengths = self._join(texts)
        tokens[np.cumsum(lengths) - 1] = end
        return tokens, lengths

    def _join(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the ids of all texts, each followed by the separator."""
        # Text by text, since most hold nothing but ASCII, which only has to be copied.
        joined = _SEPARATOR_BYTES.join([*map(str.encode, texts), b""])
        tokens = self._gigatoken.encode(joined).view(np.int32)
        positions = np.flatnonzero(tokens == self._separator)
        if len(positions) != len(texts):
            raise ValueError(f"a text holds {SEPARATOR!r}")
        lengths = positions + 1  # of all texts up to here; np.diff takes twice as long
        lengths[1:] -= positions[:-1] + 1
        return tokens, lengths

    def _lists(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        layout = self._gigatoken.encode_batch(list(texts), parallel=False).layout
        ends = np.asarray(layout.offsets.data, np.int64)
        tokens = np.asarray(layout.content.data)[ends[0] : ends[-1]].view(np.int32)
        if self._separator >= 0 and (tokens == self._separator).any():
            raise ValueError(f"a text holds {SEPARATOR!r}")
        return tokens, np.diff(ends)

    def decode(self, ids: NDArray) -> bytes:
        """Return the bytes of `ids`, which may begin or end within a character."""
        return self._gigatoken.decode(ids)


class WordEncoder(FastEncoder):
    """BLOOM's way of cutting words, with the ids of each word remembered.

    Args:
        backend: encodes words that are not known yet.
        most_pieces: remembered, but for those of one text.

    Raises:
        ValueError: words are cut in another way.
    """

    library = "looking words up"

    def __init__(self, backend: Backend, *, most_pieces: int = 1 << 20):
        described = json.loads(backend.to_str())
        cut = (described["pre_tokenizer"] or {}).get("pretokenizers", [{}])
        if [part.get("type") for part in cut] != ["Split", "ByteLevel"] or (
            cut[0]["pattern"] != {"Regex": _BLOOM} or described["normalizer"] is not None
        ):
            raise ValueError("words are cut in another way than BLOOM's")
        self.joins, self._separator = False, -1
        self._prefix = self._suffix = np.array([], np.int32)
        self._backend = backend
        self._most_pieces = most_pieces
        self._ids: dict[str, list[int]] = {}
        self._added = [token["content"] for token in described["added_tokens"]]

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`."""
        return self.encode_array([text])[0].tolist()

    def _lists(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        rows = [self._row(text) for text in texts]
        return np.concatenate(rows), np.array([row.size for row in rows], np.int64)

    def _row(self, text: str) -> NDArray[np.int32]:
        if any(token in text for token in self._added):
            return np.array(self._backend.encode(text, add_special_tokens=False).ids, np.int32)
        pieces = _PIECE.findall(text)
        if new := list(set(pieces).difference(self._ids)):
            if len(self._ids) > self._most_pieces:
                self._ids.clear()
                new = list(set(pieces))
            found = self._backend.encode_batch_fast(new, add_special_tokens=False)
            self._ids.update(zip(new, (one.ids for one in found), strict=True))
        ids = chain.from_iterable(map(self._ids.__getitem__, pieces))
        return np.fromiter(ids, np.int32)

    def decode(self, ids: NDArray) -> bytes:
        """Return the bytes of `ids`; those that are no character become one of U+FFFD."""
        return self._backend.decode(ids.tolist(), skip_special_tokens=False).encode()


def _with_separator(tokenizer_json: str) -> tuple[str, int]:
    """Return the tokenizer with one more token, and the id of that."""
    tokenizer = json.loads(tokenizer_json)
    added = tokenizer["added_tokens"]
    vocab = tokenizer["model"]["vocab"]
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    separator = 1 + max([*ids, *(token["id"] for token in added)])
    if any(SEPARATOR[0] in token["content"] for token in added):
        raise ValueError("a token might begin in a text and end in the separator")
    token = {"id": separator, "content": SEPARATOR, "special": True, "normalized": False}
    added.append(token | dict.fromkeys(("single_word", "lstrip", "rstrip"), False))
    return json.dumps(tokenizer), separator


def _with_affixes(
    tokens: NDArray[np.int32],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    prefix: NDArray[np.int32],
    suffix: NDArray[np.int32],
) -> NDArray[np.int32]:
    # At one index np.insert keeps the order of its values: text i's end comes before i + 1's start.
    positions = np.stack([starts, starts + lengths], 1)
    around = np.concatenate([prefix, suffix])
    repeated = np.repeat(positions, [prefix.size, suffix.size], axis=1)
    return np.insert(tokens, repeated.ravel(), np.tile(around, len(starts)))


def load_fast(reference: Tokenizer) -> FastEncoder | str:
    """Return a fast encoder with the ids of `reference`, or why there is none."""
    backend = getattr(reference, "backend", None)
    if backend is None:
        return "it is not a tokenizer of the tokenizers library"
    try:
        encoder: FastEncoder = WordEncoder(backend)
    except ValueError:
        try:
            encoder = FastEncoder(backend.to_str())
        except ImportError:
            return f"the gigatoken library is not installed ({install('gigatoken')})"
        except Exception as error:  # the library defines no exception type
            return f"gigatoken cannot read it: {str(error).strip().partition(chr(10))[0]}"
    try:
        encoder.add_affixes(reference)
        found = difference(reference, encoder)
        if found and encoder.joins:
            encoder.joins = False
            found = difference(reference, encoder)
        return found or encoder
    except Exception as error:  # of the library, or of a text that has no tokens
        return f"the two cannot be compared: {error}"


def difference(reference: Tokenizer, encoder: FastEncoder) -> str | None:
    """Describe the first text whose ids differ; None when all are the same."""
    texts = _texts_to_compare(reference)
    tokens, lengths = encoder.encode_array(texts)
    ends = lengths.cumsum().tolist()
    for text, expected, end, length in zip(
        texts, reference.encode_batch(texts), ends, lengths.tolist(), strict=True
    ):
        found = tokens[end - length : end].tolist()
        if found != expected:
            position = [one == two for one, two in zip_longest(found, expected)].index(False)
            return (
                f"{encoder.library} gives other ids: of {text[:40]!r}, id {position} is "
                f"{found[position : position + 1]} and not {expected[position : position + 1]}"
            )
    return None


def decodes_alike(reference: Tokenizer, encoder: FastEncoder) -> bool:
    """Whether `encoder` decodes the ids of the texts that `difference` compares as `reference`."""
    tokens, lengths = encoder.encode_array(_texts_to_compare(reference))
    return all(
        encoder.decode(ids).decode("utf-8", "replace") == reference.decode(ids.tolist())
        for ids in np.split(tokens, lengths.cumsum()[:-1])
    )


def _texts_to_compare(reference: Tokenizer) -> list[str]:
    added = getattr(reference, "backend").get_added_tokens_decoder().values()  # noqa: B009
    texts = adversarial_texts([token.content for token in added])
    return texts + _texts_of_vocabulary(reference)


def _texts_of_vocabulary(reference: Tokenizer) -> list[str]:
    """Return texts made of some of the tokens, so that merges of every age are compared."""
    step = max(1, reference.vocab_size // _SAMPLED_IDS)
    ids = range(0, reference.vocab_size, step)
    return [reference.decode(ids[i : i + 50]) for i in range(0, len(ids), 50)]
