"""Metrics: accuracy, F1, Matthews, Pearson, Spearman; entity-level F1 by the rules of conlleval."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.config.data.tag_schemes import OUTSIDE, PREFIXES


def confusion_matrix(predictions: NDArray, labels: NDArray, num_classes: int) -> NDArray[np.int64]:
    """Count the examples of each pair of true and predicted class.

    Shapes: predictions [n], labels [n], integers below num_classes -> [true, predicted].
    """
    pairs = np.asarray(labels, np.int64) * num_classes + np.asarray(predictions, np.int64)
    counts = np.bincount(pairs, minlength=num_classes * num_classes)
    return counts.reshape(num_classes, num_classes)


def accuracy(predictions: NDArray, labels: NDArray) -> float:
    """Return the fraction of correct predictions; NaN if there are none."""
    return _ratio(int((predictions == labels).sum()), len(labels), otherwise=math.nan)


def f1(predictions: NDArray, labels: NDArray) -> float:
    """Return the F1 score of class 1; 0 if it is neither true nor predicted anywhere."""
    correct = int(((predictions == 1) & (labels == 1)).sum())
    return _ratio(2 * correct, int((predictions == 1).sum()) + int((labels == 1).sum()))


def matthews(predictions: NDArray, labels: NDArray) -> float:
    """Return the Matthews correlation of two or more classes; 0 where it is undefined.

    Source: Gorodkin, doi:10.1016/j.compbiolchem.2004.09.006.
    """
    num_classes = int(max(predictions.max(initial=0), labels.max(initial=0))) + 1
    matrix = confusion_matrix(predictions, labels, num_classes)
    # Python's integers: the products of large counts do not fit 64 bits.
    predicted, true = matrix.sum(0).tolist(), matrix.sum(1).tolist()
    total, correct = len(labels), int(matrix.trace())
    covariance = correct * total - sum(p * t for p, t in zip(predicted, true, strict=True))
    variances = [total**2 - sum(count**2 for count in counts) for counts in (predicted, true)]
    return _ratio(covariance, math.sqrt(variances[0] * variances[1]))


def pearson(predictions: NDArray, labels: NDArray) -> float:
    """Return the linear correlation in fp64; NaN if either side is constant."""
    x, y = (np.asarray(values, np.float64) for values in (predictions, labels))
    if len(x) < 2 or (x == x[0]).all() or (y == y[0]).all():
        return math.nan
    x, y = x - x.mean(), y - y.mean()
    return float(np.clip((x / np.linalg.norm(x)) @ (y / np.linalg.norm(y)), -1, 1))


def spearman(predictions: NDArray, labels: NDArray) -> float:
    """Return the correlation of the ranks; equal values share the mean of their ranks."""
    return pearson(_ranks(predictions), _ranks(labels))


def _ranks(values: NDArray) -> NDArray:
    values = np.asarray(values, np.float64)
    if np.isnan(values).any():
        return np.full(len(values), math.nan)
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[inverse]


METRICS: dict[str, Callable[[NDArray, NDArray], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}
"""Metrics by name: of all predictions, classes or numbers, and as many labels."""


@dataclass(frozen=True)
class Score:
    """Precision, recall and F1 of a class or an average, as fractions.

    Args:
        support: examples, tokens or entities that truly are of the class.
    """

    precision: float
    recall: float
    f1: float
    support: int

    @classmethod
    def of(cls, correct: int, predicted: int, true: int) -> "Score":
        """Return the score of these counts; 0 in place of a division by 0."""
        return cls(
            precision=_ratio(correct, predicted),
            recall=_ratio(correct, true),
            f1=_ratio(2 * correct, predicted + true),
            support=true,
        )


MACRO_AVERAGES = {
    "supported": "classes with support",
    "all": "classes with support and predicted ones",
}
"""Classes whose mean is a macro average, by --macro-average."""


def class_scores(
    confusion: NDArray, names: Sequence[str], macro_average: str = "supported"
) -> dict[str, Score]:
    """Return the score of each class, and their averages as `scores_with_averages` does."""
    rows = zip(confusion.diagonal(), confusion.sum(0), confusion.sum(1), strict=True)
    counts = [(int(c), int(p), int(t)) for c, p, t in rows]
    return scores_with_averages(dict(zip(names, counts, strict=True)), macro_average)


def scores_with_averages(
    counts: Mapping[str, tuple[int, int, int]], macro_average: str = "supported"
) -> dict[str, Score]:
    """Return the score of each class, and "micro avg", "macro avg", "weighted avg" of all.

    The macro average is a mean over classes, the weighted average counts each class by its support.

    Args:
        counts: correct, predicted and true examples of each class.
        macro_average: "supported", classes with support, as NeMo does; or "all", also those that are
            only predicted, as scikit-learn and seqeval do.
    """
    scores = {name: Score.of(*count) for name, count in counts.items()}
    rows, counts_all = [*counts.values()], macro_average == "all"
    totals = [sum(row[i] for row in rows) for i in range(3)]
    support = totals[2]

    def mean(weights: list[int]) -> Score:
        def of(field: str) -> float:
            values = [getattr(score, field) for score in scores.values()]
            products = (v * w for v, w in zip(values, weights, strict=True))
            return _ratio(math.fsum(products), sum(weights))

        return Score(of("precision"), of("recall"), of("f1"), support)

    averages = {
        "micro avg": Score.of(*totals),
        "macro avg": mean([int(bool(true or (counts_all and found))) for _, found, true in rows]),
        "weighted avg": mean([true for *_, true in rows]),
    }
    return scores | averages


def entities(tags: Sequence[str], scheme: str = "BIOES") -> Iterator[tuple[str, int, int]]:
    """Yield type, start and end of each entity of a sentence; the end is exclusive.

    An entity begins at B- or S-, after E- or S-, where the type changes, and at an I- or E- after
    O. A tag that is neither O nor has a prefix of the scheme is a type by itself, as I- of that
    type; B and I alone have the type "".

    Args:
        scheme: whose prefixes tags have; see `PREFIXES`.
    """
    start, previous, current = 0, "O", ""
    for i, tag in enumerate([*tags, "O"]):
        prefix, kind = _parse_tag(tag, PREFIXES[scheme])
        is_continued = prefix in "IE" and previous in "BI" and kind == current
        if not is_continued:
            if previous != "O":
                yield current, start, i
            start, current = i, kind
        previous = prefix


def entity_scores(
    predictions: Sequence[Sequence[str]],
    labels: Sequence[Sequence[str]],
    *,
    scheme: str = "BIOES",
    macro_average: str = "supported",
) -> dict[str, Score]:
    """Return the score of each type of entity, and their averages.

    An entity is correct if its type and both of its borders are. "micro avg" is the overall score of
    conlleval.

    Args:
        predictions: tags of each sentence, as many as its `labels`.
        scheme: whose prefixes tags have; see `PREFIXES`.
        macro_average: see `scores_with_averages`.
    """
    correct: Counter[str] = Counter()
    predicted: Counter[str] = Counter()
    true: Counter[str] = Counter()
    for predicted_tags, true_tags in zip(predictions, labels, strict=True):
        if len(predicted_tags) != len(true_tags):
            raise ValueError(f"{len(predicted_tags)} predictions for {len(true_tags)} labels")
        found, expected = ({*entities(tags, scheme)} for tags in (predicted_tags, true_tags))
        predicted.update(kind for kind, *_ in found)
        true.update(kind for kind, *_ in expected)
        correct.update(kind for kind, *_ in found & expected)
    kinds = sorted(predicted | true)
    counts = {kind: (correct[kind], predicted[kind], true[kind]) for kind in kinds}
    return scores_with_averages(counts, macro_average)


def _parse_tag(tag: str, prefixes: Mapping[str, str]) -> tuple[str, str]:
    """Return the prefix of a tag, as BIOES has it, and its type."""
    prefix, _, kind = tag.partition("-")
    if prefix in prefixes:
        return prefixes[prefix], kind
    return ("O", "") if tag == OUTSIDE else ("I", tag)


def score_table(scores: Mapping[str, Score]) -> str:
    """Return a table of scores in percent, a line for each class and average."""
    header = ("", "precision", "recall", "f1", "support")
    rows = [
        (name, *(f"{100 * v:.2f}" for v in (s.precision, s.recall, s.f1)), str(s.support))
        for name, s in scores.items()
    ]
    return _table([header, *rows])


def confusion_table(confusion: NDArray, names: Sequence[str]) -> str:
    """Return a table of a confusion matrix: a line for each true class."""
    rows = [(name, *map(str, row)) for name, row in zip(names, confusion.tolist(), strict=True)]
    return _table([("true \\ predicted", *names), *rows])


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _ratio(part: float, total: float, *, otherwise: float = 0.0) -> float:
    return part / total if total else otherwise
