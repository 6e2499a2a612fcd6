"""Exact match and F1 of SQuAD by the rules of its official evaluations.

SQuAD 2.0's leaves out right answers without a word (articles and punctuation alone), and the F1
of two texts without a word is 1. SQuAD 1.1's keeps such answers, and this F1 is 0.
"""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

from megatron.extensions.tasks.data.squad import Question

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower the letters, drop ASCII punctuation and articles, collapse white space."""
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(prediction: str, answers: Sequence[str], rules: str = "2.0") -> float:
    """Return 1 if the prediction equals one of the answers when normalized, otherwise 0."""
    return float(normalize_answer(prediction) in map(normalize_answer, _right(answers, rules)))


def answer_f1(prediction: str, answers: Sequence[str], rules: str = "2.0") -> float:
    """Return the best F1 between the words of the prediction and of an answer."""
    return max(_f1(prediction, answer, rules) for answer in _right(answers, rules))


def squad_scores(
    predictions: Mapping[str, str],
    questions: Sequence[Question],
    *,
    null_odds: Mapping[str, float] | None = None,
    rules: str = "2.0",
) -> dict[str, float]:
    """Return the scores of the official evaluation in percent, under the names of SQuAD 2.0.

    Args:
        predictions: answer to each question by its id.
        null_odds: the larger, the less likely has a question an answer. With it, the scores have
            best_exact and best_f1: those with the best threshold on it.
        rules: of the evaluation of SQuAD "1.1" or "2.0".

    Raises:
        ValueError: a question has no prediction.
    """
    if missing := [q.uid for q in questions if q.uid not in predictions]:
        raise ValueError(f"{len(missing)} questions without prediction, the first: {missing[0]!r}")
    exact = {q.uid: exact_match(predictions[q.uid], q.answers, rules) for q in questions}
    f1 = {q.uid: answer_f1(predictions[q.uid], q.answers, rules) for q in questions}
    groups = {
        "": [q.uid for q in questions],
        "HasAns_": [q.uid for q in questions if q.answers],
        "NoAns_": [q.uid for q in questions if not q.answers],
    }
    scores: dict[str, float] = {}
    for prefix, uids in groups.items():
        if uids:
            scores[f"{prefix}exact"] = 100.0 * sum(exact[uid] for uid in uids) / len(uids)
            scores[f"{prefix}f1"] = 100.0 * sum(f1[uid] for uid in uids) / len(uids)
            scores[f"{prefix}total"] = len(uids)
    if null_odds is not None:
        answerable = set(groups["HasAns_"])
        for name, of_question in (("best_exact", exact), ("best_f1", f1)):
            best, threshold = _best_threshold(predictions, of_question, null_odds, answerable)
            scores |= {name: best, f"{name}_thresh": threshold}
    return scores


def _right(answers: Sequence[str], rules: str) -> Sequence[str]:
    """Return the answers that count; the answer "" if there is none."""
    return [answer for answer in answers if rules == "1.1" or normalize_answer(answer)] or [""]


def _f1(prediction: str, answer: str, rules: str) -> float:
    predicted, right = (normalize_answer(text).split() for text in (prediction, answer))
    if not predicted or not right:
        return float(rules == "2.0" and predicted == right)
    common = (Counter(predicted) & Counter(right)).total()
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(right)
    return 2 * precision * recall / (precision + recall)


def _best_threshold(
    predictions: Mapping[str, str],
    scores: Mapping[str, float],
    null_odds: Mapping[str, float],
    answerable: set[str],
) -> tuple[float, float]:
    """Return the best score, and the threshold on `null_odds` over which the answer is ""."""
    score = best = float(len(scores) - len(answerable))
    threshold = 0.0
    for uid in sorted(scores, key=lambda uid: null_odds[uid]):
        score += scores[uid] if uid in answerable else -float(bool(predictions[uid]))
        if score > best:
            best, threshold = score, null_odds[uid]
    return 100.0 * best / len(scores), threshold
