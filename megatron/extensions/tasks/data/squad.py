"""SQuAD 1.1 and 2.0: questions about paragraphs, read from JSON and cut into windows of tokens."""

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.common.errors import ConfigError, WrongDataError, near, reason
from megatron.extensions.tasks.data.packing import EncodedTexts, SegmentPacker
from megatron.extensions.tasks.data.task import EXCERPT, require_few
from megatron.tokenizer.types.tokenizer import Tokenizer

_WORD = re.compile("[^ \t\r\n\u202f]+")
"""White space between words as BERT's code for SQuAD has it; other spaces are part of a word."""


@dataclass(frozen=True)
class Question:
    """A question about a context.

    Args:
        answers: texts of the right answers; none if the question has none, or in a test file.
        answer_start: index in `context` of the first answer; None if it is not there.
        is_impossible: whether the context holds no answer (SQuAD 2.0).
    """

    uid: str
    text: str
    context: str
    answers: tuple[str, ...] = ()
    answer_start: int | None = None
    is_impossible: bool = False


def read_squad(path: Path, *, is_training: bool, version_2: bool = False) -> list[Question]:
    """Read the questions of a file of SQuAD, in its order.

    Args:
        is_training: whether each question needs the position of its answer. Answers of an
            evaluation file may be absent. Of several answers the first that is where its
            `answer_start` says comes first; questions without such an answer are skipped and
            counted in a warning.
        version_2: whether a question may have no answer.

    Raises:
        WrongDataError: the file is missing or malformed, an id is used twice, a context is empty, or
            more than a tenth of the questions would be skipped; the message names article,
            paragraph and question.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise WrongDataError(f"cannot read {path}: {reason(error, path)}{near(path)}") from error
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise WrongDataError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from error
    questions: list[Question] = []
    skipped: list[WrongDataError] = []
    seen: set[str] = set()
    for place, context, entry in _entries(path, content):
        uid = str(entry.get("id", ""))
        try:
            if not uid:
                raise ValueError("the id is missing")
            if uid in seen:
                raise ValueError("the id is used twice")
            seen.add(uid)
            questions.append(
                _question(uid, context, entry, is_training=is_training, version_2=version_2)
            )
        except ValueError as error:
            wrong = WrongDataError(
                f"{path}{_line_of(uid, text)}, {place}, question {uid!r}: {error}"
            )
            if not isinstance(error, _MisplacedAnswerError):
                raise wrong from error
            skipped.append(wrong)
    require_few(skipped, len(skipped) + len(questions), "questions", at_most=0.1)
    if not questions:
        raise WrongDataError(f"{path}: no question")
    return questions


class _MisplacedAnswerError(ValueError):
    """No answer of a question is at its position in the context."""


def _line_of(uid: str, text: str) -> str:
    """Return the line of an id for a message; "" in a file of one line."""
    quoted = (json.dumps(uid), json.dumps(uid, ensure_ascii=False))
    found = max(text.rfind(each) for each in quoted)
    is_one_line = "\n" not in text.rstrip()
    return "" if is_one_line or found < 0 else f", line {text.count(chr(10), 0, found) + 1}"


_FORM = (
    '{"data": [{"paragraphs": [{"context": "...", "qas": [{"id": "...", "question": "...", '
    '"answers": [{"text": "...", "answer_start": 0}]}]}]}]}'
)


def _entries(path: Path, content: Any) -> Iterator[tuple[str, Any, dict]]:
    """Yield place, context and JSON object of each question.

    Raises:
        WrongDataError: a key is missing or of another type; the message names article and paragraph.
    """

    def items(owner: Any, key: str, where: str) -> Iterator[tuple[int, dict]]:
        found = owner.get(key) if isinstance(owner, dict) else None
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
            problem = "is missing" if found is None else "is no list of objects"
            raise WrongDataError(f"{path}{where}: {key!r} {problem}; the form of SQuAD is {_FORM}")
        yield from enumerate(found, start=1)

    for number, article in items(content, "data", ""):
        title = f" ({article['title']!r})" if article.get("title") else ""
        place = f"article {number}{title}"
        for count, paragraph in items(article, "paragraphs", f", {place}"):
            inside = f"{place}, paragraph {count}"
            if "context" not in paragraph:
                raise WrongDataError(
                    f"{path}, {inside}: 'context' is missing; the form of SQuAD is {_FORM}"
                )
            for _, entry in items(paragraph, "qas", f", {inside}"):
                yield inside, paragraph["context"], entry


def _question(
    uid: str, context: Any, entry: dict, *, is_training: bool, version_2: bool
) -> Question:
    text = entry.get("question")
    if not isinstance(context, str) or not _WORD.search(context):
        raise ValueError("the context is empty")
    if not isinstance(text, str) or not text.strip():
        raise ValueError("the question is empty")
    if entry.get("is_impossible") not in (None, False, True):
        raise ValueError(f"is_impossible is {entry['is_impossible']!r}; it must be true or false")
    if entry.get("is_impossible") and version_2:
        return Question(uid, text, context, is_impossible=True)
    answers = [*_answers(entry, needs_start=is_training)]
    if is_training and not answers:
        hint = (
            "is_impossible is not true"
            if version_2
            else "give --version-2-with-negative if this is SQuAD 2.0"
        )
        raise ValueError(f"it has no answer; {hint}")
    # In front comes the answer that is trained on: sorting is stable, and False is less than True.
    answers.sort(key=lambda each: not _is_in(each[0], each[1], context))
    texts = tuple(answer for answer, _ in answers)
    if answers and _is_in(texts[0], answers[0][1], context):
        return Question(uid, text, context, texts, answers[0][1])
    if is_training:
        answer, start = texts[0], answers[0][1] or 0
        raise _MisplacedAnswerError(
            f"the answer {answer[:EXCERPT]!r} is not in the context at {start}: "
            f"{context[max(start, 0) :][: len(answer)][:EXCERPT]!r}"
        )
    return Question(uid, text, context, texts)


def _answers(entry: dict, *, needs_start: bool) -> Iterator[tuple[str, int | None]]:
    """Yield text and position of each answer of a question.

    Raises:
        ValueError: one lacks them, or they are of another type.
    """
    try:
        for answer in entry.get("answers") or []:
            has_start = needs_start or answer.get("answer_start") is not None
            yield str(answer["text"]), int(answer["answer_start"]) if has_start else None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"answers must have text and answer_start ({error!r})") from error


def _is_in(answer: str, start: int | None, context: str) -> bool:
    """Whether the words around the answer's position hold it, whatever the white space."""
    if start is None or not answer.strip() or not 0 <= start < len(context):
        return False
    if context.startswith(answer, start):
        return True
    words = Words.of(context)
    around = words.texts[words.slice_of(start, len(answer))]
    return " ".join(answer.split()) in " ".join(around)


@dataclass(frozen=True)
class Words:
    """Words of a text, and the index of the character that each begins at."""

    texts: list[str]
    starts: list[int]

    @classmethod
    def of(cls, text: str) -> "Words":
        """Split `text` at white space."""
        found = [*_WORD.finditer(text)]
        return cls([match.group() for match in found], [match.start() for match in found])

    def slice_of(self, start: int, length: int) -> slice:
        """Return the words of some characters. White space belongs to the word before it."""
        first, last = (bisect_right(self.starts, i) for i in (start, start + length - 1))
        return slice(max(first - 1, 0), last)


@dataclass(frozen=True)
class WindowSpec:
    """Windows of a context that are read together with a question.

    Args:
        seq_length: tokens of a row.
        doc_stride: tokens between the beginnings of two windows.
        max_query_length: tokens that a question is cut to.
    """

    seq_length: int = 384
    doc_stride: int = 128
    max_query_length: int = 64


@dataclass(frozen=True)
class Context:
    """Words and tokens of a context.

    Shapes: tokens, word_of_token [tokens]; first_token [words + 1], where the tokens of a word
        begin.
    """

    words: Words
    tokens: NDArray
    word_of_token: NDArray
    first_token: NDArray


@dataclass(frozen=True)
class Window:
    """Tokens of a context in one row: [CLS] question [SEP] window [SEP].

    Args:
        question: index of the question.
        start: index in the context of the window's first token.
        offset: index in the row of that token.
        is_max_context: whether no other window shows more of the context around a token.

    Shapes: is_max_context [length] bool.
    """

    question: int
    start: int
    length: int
    offset: int
    is_max_context: NDArray


class SquadDataset:
    """Question answering: rows of a question and a window of its context.

    Each word is encoded alone. A row has the positions of its question's first answer if that lies
    in its window, and otherwise 0 and 0, the positions of [CLS].

    Raises:
        ConfigError: a question leaves no room for tokens of a context.
        DataError: the tokenizer has no [CLS], [SEP] or [PAD].
        WrongDataError: an answer has no tokens.

    Shapes: dataset[i] -> {"text", "types", "padding_mask": [seq_length], "start_positions",
        "end_positions", "uid": []} int64, where uid is i.
    """

    def __init__(self, questions: Sequence[Question], *, tokenizer: Tokenizer, spec: WindowSpec):
        if spec.seq_length - spec.max_query_length - 3 < 1 or spec.doc_stride < 1:
            raise ConfigError(
                f"rows of {spec.seq_length} tokens with questions of up to {spec.max_query_length} "
                f"and a stride of {spec.doc_stride}: seq_length must be over max_query_length + 3, "
                "doc_stride at least 1"
            )
        self.questions = questions
        self.spec = spec
        self._packer = SegmentPacker.of(tokenizer, spec.seq_length)
        numbers: dict[str, int] = {}
        words = {q.context: Words.of(q.context) for q in questions}
        for text in (
            *(word for context_words in words.values() for word in context_words.texts),
            *(q.text for q in questions),
            *(q.answers[0] for q in questions if q.answer_start is not None),
        ):
            numbers.setdefault(text, len(numbers))
        texts = EncodedTexts([*numbers], tokenizer)
        contexts = {
            text: _context(context_words, [texts[numbers[word]] for word in context_words.texts])
            for text, context_words in words.items()
        }
        self.contexts = [contexts[q.context] for q in questions]
        self._queries = [texts[numbers[q.text]][: spec.max_query_length] for q in questions]
        self._spans = [
            None
            if q.answer_start is None
            else _answer_span(q, context, texts[numbers[q.answers[0]]])
            for q, context in zip(questions, self.contexts, strict=True)
        ]
        self.windows = [
            window
            for i, (context, query) in enumerate(zip(self.contexts, self._queries, strict=True))
            for window in _windows(i, len(context.tokens), len(query), spec)
        ]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, i: int) -> dict[str, NDArray]:
        window = self.windows[i]
        tokens = self.contexts[window.question].tokens
        row = self._packer.pack(
            self._queries[window.question], tokens[window.start : window.start + window.length]
        )
        start, end = 0, 0
        span = self._spans[window.question]
        if span and window.start <= span[0] and span[1] < window.start + window.length:
            start, end = (token - window.start + window.offset for token in span)
        numbers = {"start_positions": start, "end_positions": end, "uid": i}
        return row | {name: np.array(number, np.int64) for name, number in numbers.items()}


def _context(words: Words, tokens: list[NDArray]) -> Context:
    lengths = [len(word_tokens) for word_tokens in tokens]
    return Context(
        words,
        np.concatenate(tokens),
        np.repeat(np.arange(len(lengths)), lengths),
        np.concatenate([[0], np.cumsum(lengths)]),
    )


def _answer_span(question: Question, context: Context, answer: NDArray) -> tuple[int, int]:
    """Return the first and the last token of the first answer of a question.

    Of the tokens of its words, those that equal the tokens of the answer's text alone, if such
    exist: "1895" of the word "(1895-1943)".
    """
    text = question.answers[0]
    answer_words = context.words.slice_of(question.answer_start or 0, len(text))
    begin, end = (
        int(context.first_token[word]) for word in (answer_words.start, answer_words.stop)
    )
    if begin == end:
        raise WrongDataError(f"question {question.uid!r}: no tokens for the answer {text!r}")
    size = len(answer)
    for start in range(begin, end - size + 1):
        if size and (context.tokens[start : start + size] == answer).all():
            return start, start + size - 1
    return begin, end - 1


def _windows(question: int, num_tokens: int, num_query: int, spec: WindowSpec) -> list[Window]:
    """Return the windows of a context, each token of which is in at least one."""
    room = spec.seq_length - num_query - 3
    ranges = [(0, min(room, num_tokens))]
    while sum(ranges[-1]) < num_tokens:
        start = ranges[-1][0] + min(ranges[-1][1], spec.doc_stride)
        ranges.append((start, min(room, num_tokens - start)))
    # A token has as much context as on the side where it has less of it.
    scores = np.full((len(ranges), num_tokens), -1.0)
    for row, (start, length) in zip(scores, ranges, strict=True):
        left = np.arange(length)
        row[start : start + length] = np.minimum(left, left[::-1]) + 0.01 * length
    best = scores.argmax(0)
    return [
        Window(question, start, length, num_query + 2, best[start : start + length] == i)
        for i, (start, length) in enumerate(ranges)
    ]
