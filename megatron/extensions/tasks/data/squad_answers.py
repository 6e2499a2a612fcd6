"""Answers of SQuAD from start and end logits: n-best list, null score, text of the context."""

import json
import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.common.atomic_files import replace_text
from megatron.extensions.tasks.data.squad import Context, Question, SquadDataset, Window


@dataclass(frozen=True)
class AnswerSpec:
    """How answers are chosen.

    Args:
        n_best_size: starts and ends of a window that are combined, and answers that are kept.
        max_answer_length: in tokens.
        version_2: whether a question may have no answer; then the answer "" competes.
        null_score_diff_threshold: the answer is "" if its score exceeds the best one by more.
        lower_case: whether the tokenizer lowers letters and drops accents.
    """

    n_best_size: int = 20
    max_answer_length: int = 30
    version_2: bool = False
    null_score_diff_threshold: float = 0.0
    lower_case: bool = True


class Candidate(NamedTuple):
    """A possible answer."""

    text: str
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        """Sum of the logits."""
        return self.start_logit + self.end_logit


@dataclass(frozen=True)
class Prediction:
    """The answer to a question, and the candidates by falling score with their probabilities.

    Args:
        null_score_diff: score of no answer minus the best text's score; 0 in SQuAD 1.1.
    """

    question: Question
    answer: str
    candidates: list[Candidate]
    probabilities: list[float]
    null_score_diff: float


def predict(
    dataset: SquadDataset,
    start_logits: NDArray,
    end_logits: NDArray,
    *,
    spec: AnswerSpec,
    token_texts: Sequence[str],
) -> list[Prediction]:
    """Return the prediction for each question.

    Args:
        token_texts: text of each token id, with "##" where a token goes on with a word.

    Shapes: start_logits, end_logits [windows, seq_length], in the order of the windows.
    """
    rows = zip(dataset.windows, np.asarray(start_logits), np.asarray(end_logits), strict=True)
    predictions = []
    for i, question_rows in groupby(rows, key=lambda row: row[0].question):
        question, context = dataset.questions[i], dataset.contexts[i]
        candidates = _candidates([*question_rows], context, spec, token_texts)
        scores = [candidate.score for candidate in candidates]
        exponentials = [math.exp(score - max(scores)) for score in scores]
        probabilities = [e / math.fsum(exponentials) for e in exponentials]
        answer, difference = candidates[0].text, 0.0
        if spec.version_2:
            null = next(candidate.score for candidate in candidates if not candidate.text)
            best = next((c for c in candidates if c.text), Candidate("", 0.0, 0.0))
            difference = null - best.score
            answer = "" if difference > spec.null_score_diff_threshold else best.text
        predictions.append(Prediction(question, answer, candidates, probabilities, difference))
    return predictions


class _Span(NamedTuple):
    window: Window | None  # None: no answer
    start: int
    end: int
    start_logit: float
    end_logit: float


def _candidates(
    rows: list[tuple[Window, NDArray, NDArray]],
    context: Context,
    spec: AnswerSpec,
    token_texts: Sequence[str],
) -> list[Candidate]:
    """Return the n best distinct texts by falling score, and in SQuAD 2.0 "" among them.

    If there is none, the candidate is "empty", as in BERT's code.
    """
    spans = [span for row in rows for span in _spans(*row, spec)]
    null = min(rows, key=lambda row: float(row[1][0]) + float(row[2][0]))
    null_logits = float(null[1][0]), float(null[2][0])
    if spec.version_2:
        spans.append(_Span(None, 0, 0, *null_logits))
    spans.sort(key=lambda span: span.start_logit + span.end_logit, reverse=True)
    found: dict[str, Candidate] = {}
    for span in spans:
        if len(found) == spec.n_best_size:
            break
        text = _text_of(span, context, spec, token_texts) if span.window else ""
        found.setdefault(text, Candidate(text, span.start_logit, span.end_logit))
    empty = Candidate("empty", 0.0, 0.0)
    if spec.version_2:
        found.setdefault("", Candidate("", *null_logits))
        return [empty, *found.values()] if len(found) == 1 else [*found.values()]
    return [*found.values()] or [empty]


def _spans(window: Window, starts: NDArray, ends: NDArray, spec: AnswerSpec) -> list[_Span]:
    """Return the spans of a window whose start and end are among the n best."""
    best_starts, best_ends = (
        np.argsort(-logits, kind="stable")[: spec.n_best_size] for logits in (starts, ends)
    )
    spans = []
    for start in best_starts - window.offset:
        if not 0 <= start < window.length or not window.is_max_context[start]:
            continue
        for end in best_ends - window.offset:
            if start <= end < min(window.length, start + spec.max_answer_length):
                logits = (float(starts[start + window.offset]), float(ends[end + window.offset]))
                spans.append(_Span(window, int(start), int(end), *logits))
    return spans


def _text_of(span: _Span, context: Context, spec: AnswerSpec, token_texts: Sequence[str]) -> str:
    """Return the text of the context that a span stands for."""
    offset = span.window.start if span.window else 0
    first, last = span.start + offset, span.end + offset
    words = context.words.texts[context.word_of_token[first] : context.word_of_token[last] + 1]
    tokens = " ".join(token_texts[i] for i in context.tokens[first : last + 1])
    text = " ".join(tokens.replace(" ##", "").replace("##", "").split())
    return original_text(text, " ".join(words), lower_case=spec.lower_case)


def original_text(text: str, words: str, *, lower_case: bool) -> str:
    """Return the part of `words` whose tokens are `text`; all of it if that cannot be found.

    "steve smith" is "Steve Smith" of "Steve Smith's".

    Source: run_squad.py of BERT, whose answers these are.
    """
    basic = " ".join(basic_tokens(words, lower_case=lower_case))
    start = basic.find(text)
    letters = [i for i, character in enumerate(words) if character != " "]
    basic_letters = [i for i, character in enumerate(basic) if character != " "]
    if start < 0 or not text or len(letters) != len(basic_letters):
        return words
    index = {position: number for number, position in enumerate(basic_letters)}
    first, last = (index.get(i) for i in (start, start + len(text) - 1))
    if first is None or last is None:
        return words
    return words[letters[first] : letters[last] + 1]


def basic_tokens(text: str, *, lower_case: bool) -> list[str]:
    """Split a text as BERT does before WordPiece: at white space, punctuation and ideographs."""
    cleaned = "".join(map(_clean, unicodedata.normalize("NFC", text)))
    tokens = []
    for word in cleaned.split():
        if lower_case:
            decomposed = unicodedata.normalize("NFD", word.lower())
            word = "".join(c for c in decomposed if unicodedata.category(c) != "Mn")
        tokens += "".join(f" {c} " if _is_punctuation(c) else c for c in word).split()
    return tokens


def _clean(character: str) -> str:
    if character in "\t\n\r" or unicodedata.category(character) == "Zs":
        return " "
    if character == "\ufffd" or unicodedata.category(character).startswith("C"):
        return ""
    return f" {character} " if _is_ideograph(ord(character)) else character


def _is_punctuation(character: str) -> bool:
    is_symbol = character.isascii() and character.isprintable() and not character.isalnum()
    return is_symbol or unicodedata.category(character).startswith("P")


_IDEOGRAPHS = (
    *((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F)),
    *((0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)),
)


def _is_ideograph(code: int) -> bool:
    return any(first <= code <= last for first, last in _IDEOGRAPHS)


def write_predictions(folder: Path, predictions: Sequence[Prediction]) -> None:
    """Write the answers of all questions to `folder`.

    predictions.json has the form of the official evaluation: id to answer. null_odds.json is
    its --na-prob-file. test_prediction.json, id to question and answer, and test_nbest.json
    have NeMo's form.
    """
    content: Mapping[str, Mapping] = {
        "predictions.json": {p.question.uid: p.answer for p in predictions},
        "null_odds.json": {p.question.uid: p.null_score_diff for p in predictions},
        "test_prediction.json": {p.question.uid: [p.question.text, p.answer] for p in predictions},
        "test_nbest.json": {
            p.question.uid: [
                {"question": p.question.text, "text": c.text, "probability": probability}
                | {"start_logit": c.start_logit, "end_logit": c.end_logit}
                for c, probability in zip(p.candidates, p.probabilities, strict=True)
            ]
            for p in predictions
        },
    }
    for name, answers in content.items():
        text = json.dumps(answers, indent=4, ensure_ascii=False)
        replace_text(folder / name, text + "\n")
