"""Block encoders: tokenize documents or conversations into the arrays of the token files."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, Literal, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray

from megatron.common.errors import DataError
from megatron.data.preprocessing.quality import (
    MOST_CHARS,
    SAMPLE_ONE_IN,
    LongRuns,
    Tally,
    hash_documents,
)
from megatron.data.preprocessing.sentences import SentenceSplitter
from megatron.data.readers.documents import (
    BadLine,
    Documents,
    Selection,
    problem_of,
    read_documents,
)
from megatron.data.readers.inputs import Block, read_range


class Vocabulary(Protocol):
    """The part of a vocabulary that is needed here."""

    @property
    def tokens(self) -> Sequence[str]:
        """Text of each id; empty if the ids have none."""


class Encoder(Protocol):
    """The part of a tokenizer that is needed here."""

    vocab_size: int
    special_ids: Mapping[Any, int]

    def encode_array(self, texts: Sequence[str]) -> tuple[NDArray, NDArray]:
        """Return the ids of all texts back to back, and how many each text has."""

    def encode_ended(self, texts: Sequence[str], end: int) -> tuple[NDArray, NDArray]:
        """Return the arrays of `encode_array`, with the id `end` after the ids of each text."""

    def gives_back(self, ids: NDArray, text: str) -> bool:
        """Whether `ids` are the same text as `text` when decoded."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""

    def vocabulary(self) -> Vocabulary:
        """Return the texts of the ids."""


EmptyDocuments = Literal["drop", "per-key", "keep", "megatron-lm"]
"""Treatment of documents without tokens under some key: left out under all keys or under that key,
or kept under all, as a sequence with only the end, or as no sequence."""


@dataclass(frozen=True, kw_only=True)
class EncodingRules:
    """Encoding rules: how the text of a document becomes tokens.

    Args:
        suffix: ids that end each document.
        empty_documents: treatment of documents without tokens under some key; see
            `EmptyDocuments`.
        odd_ids: ids whose share of the tokens is reported.
        chats: lines are conversations; see chat_encoder.py.
        max_line_bytes: a longer line was not read.
        where: documents to convert; None for all.
    """

    keys: tuple[str, ...]
    dtype: np.dtype
    suffix: tuple[int, ...] = ()
    empty_documents: EmptyDocuments = "drop"
    prepend_space: bool = False
    splitter: SentenceSplitter | None = None
    odd_ids: tuple[int, ...] = ()
    chats: bool = False
    max_line_bytes: int = 1 << 26
    where: Selection | None = None

    @property
    def end(self) -> int | None:
        """The id that ends each document, where the tokenizer itself can put it."""
        can_put_it = self.splitter is None and not self.has_empty_entries
        return self.suffix[0] if len(self.suffix) == 1 and can_put_it else None

    @property
    def has_empty_entries(self) -> bool:
        """Whether a document without tokens has no sequence, and no end, as in Megatron-LM."""
        return self.empty_documents == "megatron-lm"

    @property
    def counts_sequences(self) -> bool:
        """Whether documents may have another number of sequences than one."""
        return self.splitter is not None or self.has_empty_entries

    def encode(self, encoder: Encoder, texts: Sequence[str]) -> tuple[NDArray, NDArray]:
        """Return the ids of texts that are not split, back to back, and how many each has."""
        if self.end is None:
            return encoder.encode_array(texts)
        return encoder.encode_ended(texts, self.end)


@dataclass
class EncodedKey:
    """The documents of one key: `tokens` and `sizes` of the sequences, back to back.

    `counts`: sequences of each document; None if always one.
    """

    tokens: NDArray
    sizes: NDArray
    counts: NDArray | None
    hashes: NDArray[np.uint64]
    tally: Tally
    num_documents: int  # that are written
    num_empty: int  # documents of the block without tokens, written or not


@dataclass
class Encoded:
    """Tokens and counts of a block. `keys` has one entry for each key."""

    num_lines: int
    num_documents: int
    num_dropped: int
    num_unselected: int
    num_input_bytes: int  # of text
    keys: list[EncodedKey]
    bad: list[BadLine] = field(default_factory=list)


class BlockEncoder:
    """Turns blocks into tokens, in whichever process it is made."""

    def __init__(self, encoder: Encoder, rules: EncodingRules):
        self._encoder = encoder
        self._rules = rules
        self._long_runs: dict[int, LongRuns] = defaultdict(LongRuns)  # of each key
        self._odd = _ranges(np.array(rules.odd_ids, np.int64))

    def __call__(self, block: Block) -> Encoded:
        """Return the tokens of `block`."""
        documents, columns = self._read(block)
        has_end = self._rules.end is not None
        full = [_totals(sizes, firsts) > has_end for _, sizes, firsts in columns]
        keeps = self._kept_documents(full)
        keys = [
            self._finish(column, texts, keep, self._long_runs[key])
            for key, (column, texts, keep) in enumerate(
                zip(columns, documents.texts, keeps, strict=True)
            )
        ]
        for key, key_tokens in zip(keys, full, strict=True):
            key.num_empty = len(key_tokens) - int(key_tokens.sum())
        kept = int(np.logical_or.reduce(keeps).sum())
        return Encoded(
            num_lines=documents.num_lines,
            num_documents=kept,
            num_dropped=len(documents.lines) - kept,
            num_unselected=documents.num_unselected,
            num_input_bytes=block.num_bytes,
            keys=keys,
            bad=documents.bad,
        )

    def _kept_documents(self, full: Sequence[NDArray]) -> Sequence[NDArray]:
        """Return for each key which documents are written.

        Args:
            full: for each key, which documents have tokens.
        """
        match self._rules.empty_documents:
            case "drop":
                return [np.logical_and.reduce(full)] * len(full)
            case "per-key":
                return full
            case "keep" | "megatron-lm":
                return [np.ones_like(each) for each in full]

    def _read(self, block: Block) -> tuple[Documents, list[tuple[NDArray, NDArray, NDArray]]]:
        """Return the documents of `block`, and their tokens as `_encode_all` returns them."""
        rules = self._rules
        documents = read_documents(block, rules.keys, rules.max_line_bytes, rules.where)
        return documents, self._encode_all(documents)

    def _encode_all(self, documents: Documents) -> list[tuple[NDArray, NDArray, NDArray]]:
        """Return for each key (tokens, sizes of sequences, first sequence of each document)."""
        try:
            return [self._encode(texts) for texts in documents.texts]
        except DataError:
            bad: dict[int, str] = {}
            for texts in documents.texts:
                for i, text in enumerate(texts):
                    try:
                        self._encode([text])
                    except DataError as error:
                        bad.setdefault(i, str(error))
            documents.remove(bad)
            return [self._encode(texts) for texts in documents.texts]

    def _encode(self, texts: Sequence[str]) -> tuple[NDArray, NDArray, NDArray]:
        if self._rules.prepend_space:
            texts = [" " + text if text else "" for text in texts]
        if self._rules.splitter is None:
            tokens, sizes = self._rules.encode(self._encoder, texts)
            return tokens, sizes, np.arange(len(texts))
        # A text without sentences is one empty sequence, so that it can be kept.
        sentences = [self._rules.splitter(text) or [""] for text in texts]
        flat = [sentence for text_sentences in sentences for sentence in text_sentences]
        tokens, sizes = self._encoder.encode_array(flat)
        counts = np.fromiter(map(len, sentences), np.int64, len(sentences))
        return tokens, sizes, np.cumsum(counts) - counts

    def _finish(
        self,
        column: tuple[NDArray, NDArray, NDArray],
        texts: Sequence[str],
        keep: NDArray,
        long_runs: LongRuns,
    ) -> EncodedKey:
        tokens, sizes, firsts = column
        tokens = self._to_disk(tokens)
        if not keep.all():
            texts = [text for text, is_kept in zip(texts, keep.tolist(), strict=True) if is_kept]
            keep_by_sequence = np.repeat(keep, np.diff(firsts, append=len(sizes)))
            tokens = tokens[np.repeat(keep_by_sequence, sizes)]
            firsts = firsts[keep]
            firsts = (np.cumsum(keep_by_sequence) - keep_by_sequence)[firsts]
            sizes = sizes[keep_by_sequence]
        counts = None
        if self._rules.counts_sequences:
            leaves_one = not self._rules.has_empty_entries
            firsts, sizes = _without_empty_sequences(firsts, sizes, leaves_one=leaves_one)
            counts = np.diff(firsts, append=len(sizes)).astype("<i4")
        ends = np.append(0, np.cumsum(sizes))[np.append(firsts[1:], len(sizes))[: len(firsts)]]
        hashes = hash_documents(tokens, ends)
        tally = self._tally(tokens, ends, hashes, texts)
        tally.runs = long_runs(tokens, ends)
        tokens, sizes = self._with_suffix(tokens, sizes, firsts, ends)
        return EncodedKey(
            tokens,
            sizes.astype("<i4"),
            counts,
            hashes,
            tally,
            num_documents=len(ends),
            num_empty=0,
        )

    def _with_suffix(
        self, tokens: NDArray, sizes: NDArray, firsts: NDArray, ends: NDArray
    ) -> tuple[NDArray, NDArray]:
        suffix = self._rules.suffix
        if not suffix or self._rules.end is not None or not len(ends):
            return tokens, sizes
        sizes = sizes.copy()
        behind = np.append(firsts[1:], len(sizes))
        has_sequence = behind > firsts
        sizes[behind[has_sequence] - 1] += len(suffix)
        ends = ends[has_sequence]
        positions = np.repeat(ends, len(suffix))
        return np.insert(
            tokens, positions, np.tile(np.array(suffix, tokens.dtype), len(ends))
        ), sizes

    def _to_disk(self, tokens: NDArray) -> NDArray:
        # As unsigned numbers the negative ones are too large as well.
        unsigned = tokens.view(f"u{tokens.itemsize}")
        if tokens.size and unsigned.max() >= self._encoder.vocab_size:
            raise DataError(
                f"the tokenizer gave the ids {tokens.min()} to {tokens.max()}, but its "
                f"vocabulary has {self._encoder.vocab_size}"
            )
        return tokens.astype(self._rules.dtype, copy=False)

    def _tally(
        self, tokens: NDArray, ends: NDArray, hashes: NDArray[np.uint64], texts: Sequence[str]
    ) -> Tally:
        tally = Tally()
        unsigned = tokens.view(f"u{tokens.itemsize}")
        for low, high in self._odd:  # a number below `low` becomes a large one
            inside = unsigned - unsigned.dtype.type(low) <= high - low
            tally.odd_tokens += int(np.count_nonzero(inside))
        for i in np.flatnonzero(hashes % SAMPLE_ONE_IN == 0).tolist():
            if len(texts[i]) > MOST_CHARS:
                continue
            ids = tokens[ends[i - 1] if i else 0 : ends[i] - (self._rules.end is not None)]
            text = " " * (self._rules.prepend_space and bool(texts[i])) + texts[i]
            if self._rules.splitter is not None:
                # Splitting removes the white space between sentences.
                ids, _ = self._encoder.encode_array([text])
            tally.take_decoded(text, self._encoder.gives_back(ids, text))
        return tally


def _ranges(ids: NDArray) -> list[tuple[int, int]]:
    """Return the first and last of each row of consecutive numbers."""
    if not ids.size:
        return []
    gaps = np.flatnonzero(np.diff(ids) != 1)
    first, last = ids[np.append(0, gaps + 1)], ids[np.append(gaps, ids.size - 1)]
    return list(zip(first.tolist(), last.tolist(), strict=True))


def _totals(sizes: NDArray, firsts: NDArray) -> NDArray:
    """Return the tokens of each document."""
    return np.add.reduceat(sizes, firsts) if len(firsts) < len(sizes) else sizes


def _without_empty_sequences(
    firsts: NDArray, sizes: NDArray, *, leaves_one: bool
) -> tuple[NDArray, NDArray]:
    """Drop sequences without tokens.

    Args:
        leaves_one: whether each document keeps at least one sequence.
    """
    keep = sizes > 0
    if keep.all():
        return firsts, sizes
    if leaves_one:
        keep[firsts[_totals(sizes, firsts) == 0]] = True
    return (np.cumsum(keep) - keep)[firsts], sizes[keep]


KEYS = ("tokens", "loss_mask")
"""Keys of the token files of conversations; the loss mask is 1 where the token counts, else 0."""


class ChatEncoder(Encoder, Protocol):
    """The part of a tokenizer of conversations that is needed here."""

    def encode_conversation(self, line: Any) -> tuple[NDArray, NDArray]:
        """Return the tokens of a conversation, and which of them count."""


class ConversationEncoder(BlockEncoder):
    """Turns blocks of conversations into the two keys of `KEYS`."""

    def __init__(self, encoder: ChatEncoder, rules: EncodingRules):
        super().__init__(encoder, rules)
        self._conversations = encoder

    def _read(self, block: Block) -> tuple[Documents, list[tuple[NDArray, NDArray, NDArray]]]:
        if block.rows:
            raise DataError(f"--input {block.path}: conversations are read from JSON lines")
        if block.too_long is not None:
            documents = read_documents(block, KEYS, self._rules.max_line_bytes)
        else:
            documents = Documents([], [[], []], 0)
        rows: list[tuple[NDArray, NDArray]] = []
        data = block.data
        if data is None and block.too_long is None:
            data = read_range(block.path, block.start, block.end)
        for number, line in enumerate(BytesIO(data or b"")):
            documents.num_lines = number + 1
            if line.isspace():
                continue
            try:
                rows.append(self._encode_line(line))
                documents.lines.append(number)
            except (DataError, ValueError) as error:
                excerpt = line[:80].decode("utf-8", "replace").strip()
                problem = f"{error}" if isinstance(error, DataError) else problem_of(line, error)
                documents.bad.append(BadLine(number, problem, excerpt))
        sizes = np.array([len(tokens) for tokens, _ in rows], np.int64)
        columns = [
            (np.concatenate([row[k] for row in rows] or [np.zeros(0)]).astype(np.int32), sizes)
            for k in range(2)
        ]
        documents.texts = [[""] * len(rows)] * 2  # texts of conversations are not used
        return documents, [(*column, np.arange(len(rows))) for column in columns]

    def _encode_line(self, line: bytes) -> tuple[NDArray, NDArray]:
        tokens, counts = self._conversations.encode_conversation(orjson.loads(line))
        suffix = self._rules.suffix
        return np.append(tokens, suffix), np.append(counts, np.ones(len(suffix), np.bool_))

    def _tally(
        self, tokens: NDArray, ends: NDArray, hashes: NDArray[np.uint64], texts: object
    ) -> Tally:
        # Tokens of a template are not decoded to the text of the line.
        return Tally()
