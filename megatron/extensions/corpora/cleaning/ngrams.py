"""Decontamination: n-grams that evaluations and training texts share, and their removal."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megatron.extensions.corpora.cleaning.records import Line, Record, to_bytes

_WORD = re.compile(r"\w+")
_SENTENCE_ENDS = ".!?"
SPLIT_KEY = "split_id"


def words_of(text: str) -> list[str]:
    """Return the words of `text`, in lower case.

    Each is put into lower case by itself: that may change the length of a text, and the words of
    the result would not be where they are in `text`.
    """
    return [word.lower() for word in _WORD.findall(text)]


@dataclass(frozen=True, kw_only=True)
class CutRules:
    """Rules of n-gram removal: which n-grams are cut out of documents, and how much around them.

    Args:
        min_words: of a text to look for that is shorter than an n-gram; fewer are too common.
        max_words: of an n-gram.
        key_threshold: n-grams that occur so often are common phrases and stay.
        margin: characters that go with an n-gram on each side, and on to the end of a sentence.
        min_chars: shorter pieces are dropped.
        max_pieces: a document of more pieces is dropped.
    """

    min_words: int = 8
    max_words: int = 13
    key_threshold: int = 10
    margin: int = 200
    min_chars: int = 200
    max_pieces: int = 10

    def ngrams_of(self, texts: Iterable[str]) -> list[str]:
        """Return the n-grams of evaluations' texts, each once: runs of words, or all of a short text."""
        found: dict[str, None] = {}
        for words in map(words_of, texts):
            if len(words) >= self.min_words:
                for start in range(max(len(words) - self.max_words, 0) + 1):
                    found[" ".join(words[start : start + self.max_words])] = None
        return [*found]

    def rare(self, ngrams: Iterable[str], counts: Mapping[str, int]) -> dict[str, int]:
        """Return the n-grams that documents hold so seldom that they are cut out, and how often."""
        found = {ngram: counts.get(ngram, 0) for ngram in ngrams}
        return {ngram: n for ngram, n in found.items() if n < self.key_threshold}


class NgramSet:
    """Finds n-grams in texts.

    Their first words, as many as the shortest has, are looked up before anything else is compared.
    """

    def __init__(self, ngrams: Iterable[str]):
        split = [tuple(ngram.split(" ")) for ngram in ngrams]
        self._head = min(map(len, split), default=0)
        self._first_words = {words[0] for words in split}
        self._by_head: dict[str, list[tuple[str, ...]]] = {}
        for words in split:
            self._by_head.setdefault(" ".join(words[: self._head]), []).append(words)

    def matches(self, text: str) -> list[tuple[str, int, int]]:
        """Return each n-gram that occurs in `text`, with its first and its last character."""
        found = list(self._in_words(words_of(text)))
        if not found:
            return []
        spans = [word.span() for word in _WORD.finditer(text)]
        return [(ngram, spans[first][0], spans[last][1]) for ngram, first, last in found]

    def _in_words(self, words: Sequence[str]) -> Iterator[tuple[str, int, int]]:
        """Yield each n-gram that occurs in `words`, with its first and its last word."""
        for start, word in enumerate(words):
            if word in self._first_words:
                head = " ".join(words[start : start + self._head])
                for ngram in self._by_head.get(head, ()):
                    end = start + len(ngram)
                    if tuple(words[start:end]) == ngram:
                        yield " ".join(ngram), start, end - 1


@dataclass(frozen=True)
class CountNgrams:
    """Counts how often each n-gram occurs in documents."""

    ngrams: NgramSet
    key: str

    def __call__(self, batch: Sequence[Line]) -> Counter[str]:
        """Return the counts in these lines."""
        counts: Counter[str] = Counter()
        for line in batch:
            text = line.text(line.record(), self.key)
            counts.update(ngram for ngram, _, _ in self.ngrams.matches(text))
        return counts


@dataclass(frozen=True)
class Cut:
    """Result of the decontamination of one document.

    Args:
        pieces: records to write, without an end of line; the line as it was if it was not cut.
        was_cut: whether it had an n-gram.
        had_too_many: whether it fell into so many pieces that it was dropped.
    """

    pieces: tuple[bytes, ...]
    was_cut: bool = False
    had_too_many: bool = False


@dataclass(frozen=True)
class CutDocuments:
    """Removes the n-grams and the text around them from documents.

    Args:
        key: of the text.
        prefix: of the ids of pieces.
    """

    ngrams: NgramSet
    key: str
    prefix: str
    rules: CutRules = CutRules()

    def __call__(self, numbered: tuple[int, Sequence[Line]]) -> list[Cut]:
        """Return the results of these lines, the first of which has the given number."""
        first, batch = numbered
        return [self._cut(number, line) for number, line in enumerate(batch, start=first)]

    def _cut(self, number: int, line: Line) -> Cut:
        record = line.record()
        text = line.text(record, self.key)
        spans = [(start, end) for _, start, end in self.ngrams.matches(text)]
        if not spans:
            return Cut((line.raw,))
        pieces = [
            piece
            for piece in pieces_around(text, spans, self.rules.margin)
            if len(piece) >= self.rules.min_chars
        ]
        if len(pieces) > self.rules.max_pieces:
            return Cut((), True, True)
        return Cut(tuple(self._records(record, number, pieces)), True)

    def _records(self, record: Record, number: int, pieces: Sequence[str]) -> Iterator[bytes]:
        for i, piece in enumerate(pieces):
            split_id = f"{self.prefix}-{number:010d}-{i:04d}"
            yield to_bytes({**record, self.key: piece, SPLIT_KEY: split_id})


def pieces_around(text: str, spans: Iterable[tuple[int, int]], margin: int) -> list[str]:
    """Return the pieces of `text` outside of `spans` and their margins, cut at sentence ends."""
    pieces = []
    kept_from = 0
    for start, end in sorted(spans):
        kept_to = _sentence_end_before(text, start - margin)
        if kept_to > kept_from:
            pieces.append(text[kept_from:kept_to].strip())
        kept_from = max(kept_from, _sentence_end_after(text, end + margin))
    pieces.append(text[kept_from:].strip())
    return [piece for piece in pieces if piece]


def _sentence_end_before(text: str, position: int) -> int:
    """Return the end of the last sentence that ends before `position`, or 0."""
    return max(text.rfind(mark, 0, max(position, 0)) for mark in _SENTENCE_ENDS) + 1


def _sentence_end_after(text: str, position: int) -> int:
    """Return the first end of a sentence after `position`, or the end of the text."""
    found = [text.find(mark, position) for mark in _SENTENCE_ENDS]
    return min((end + 1 for end in found if end >= 0), default=len(text))


def to_dictionary(
    ngrams: dict[str, int], *, tasks: Sequence[str], key_threshold: int
) -> dict[str, Any]:
    """Return the content of an n-gram file: tasks, threshold, and the count of each n-gram."""
    return {"tasks": [*tasks], "key_threshold": key_threshold, "ngrams": ngrams}


def from_dictionary(text: str) -> tuple[dict[str, int], list[str]] | None:
    """Return the n-grams and tasks that a file keeps, or None if it is of another kind."""
    with suppress(ValueError):
        match json.loads(text):
            case {"tasks": [*tasks], "ngrams": dict(ngrams)}:
                is_right = all(isinstance(count, int) for count in ngrams.values())
                return (ngrams, [str(task) for task in tasks]) if is_right else None
    return None
