"""Metrics equal scikit-learn's and SciPy's, their definitions, and conlleval's rules."""

import math
from dataclasses import astuple

import numpy as np
import pytest
from problems import problem

from megatron.extensions.tasks.data.metrics import (
    METRICS,
    Score,
    accuracy,
    class_scores,
    confusion_matrix,
    confusion_table,
    entities,
    entity_scores,
    f1,
    matthews,
    pearson,
    score_table,
    spearman,
)

NAMES = [*"ABCD"]
SEEDS = range(20)


def drawn(seed, num_classes=4):
    """Return predictions and labels of a few examples, so that some classes are absent."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, num_classes, (2, int(rng.integers(1, 30))))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.filterwarnings("ignore")
def test_scores_of_classes_equal_those_of_scikit_learn(seed):
    judge = pytest.importorskip("sklearn.metrics")
    predictions, labels = drawn(seed)
    confusion = confusion_matrix(predictions, labels, 4)
    assert (confusion == judge.confusion_matrix(labels, predictions, labels=range(4))).all()
    assert accuracy(predictions, labels) == judge.accuracy_score(labels, predictions)
    assert matthews(predictions, labels) == pytest.approx(
        judge.matthews_corrcoef(labels, predictions), abs=1e-12
    )
    scores = class_scores(confusion, NAMES)
    everywhere = class_scores(confusion, NAMES, "all")["macro avg"]
    present, all_present = np.unique(labels), np.unique([labels, predictions])

    def expected(average, of=range(4)):
        options = {"labels": of, "average": average, "zero_division": 0}
        return judge.precision_recall_fscore_support(labels, predictions, **options)

    for name, *numbers in zip(NAMES, *expected(None), strict=True):
        assert astuple(scores[name]) == pytest.approx(numbers, abs=1e-12)
    for average, of in (("micro", range(4)), ("macro", present), ("weighted", range(4))):
        score = scores[f"{average} avg"]
        ours = (score.precision, score.recall, score.f1)
        assert ours == pytest.approx(expected(average, of)[:3], abs=1e-12)
        assert score.support == len(labels)
    assert astuple(everywhere)[:3] == pytest.approx(expected("macro", all_present)[:3], abs=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.filterwarnings("ignore")
def test_metrics_of_two_classes_equal_those_of_scikit_learn(seed):
    judge = pytest.importorskip("sklearn.metrics")
    predictions, labels = drawn(seed, num_classes=2)
    assert f1(predictions, labels) == pytest.approx(judge.f1_score(labels, predictions), abs=1e-12)
    assert METRICS["matthews"](predictions, labels) == pytest.approx(
        judge.matthews_corrcoef(labels, predictions), abs=1e-12
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_correlations_equal_those_of_scipy(seed):
    judge = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 11, 25) / 2  # many of them equal
    predictions = (labels + rng.normal(size=25)).round(seed % 3).astype(np.float32)
    assert pearson(predictions, labels) == pytest.approx(
        judge.pearsonr(predictions.astype(np.float64), labels)[0], abs=1e-12
    )
    assert spearman(predictions, labels) == pytest.approx(
        judge.spearmanr(predictions, labels)[0], abs=1e-12
    )


def test_undefined_scores():
    none, zeros, ones = np.zeros(0, np.int64), np.zeros(3, np.int64), np.ones(3, np.int64)
    assert math.isnan(accuracy(none, none))
    assert f1(zeros, zeros) == matthews(zeros, ones) == matthews(none, none) == 0
    assert math.isnan(pearson(zeros, np.arange(3)))
    assert math.isnan(pearson(np.arange(1), np.arange(1)))
    assert math.isnan(spearman(np.array([1, math.nan, 2]), np.arange(3)))


def test_matthews_of_many_examples_does_not_overflow():
    labels = np.arange(200_000) % 2
    predictions = np.where(np.arange(200_000) % 4 < 3, labels, 1 - labels)
    assert matthews(predictions, labels) == pytest.approx(1 / math.sqrt(3))


def test_tables_show_every_class():
    confusion = np.array([[3, 1], [0, 4]])
    assert confusion_table(confusion, ["no", "yes"]).splitlines() == [
        "true \\ predicted  no  yes",
        "no                 3    1",
        "yes                0    4",
    ]
    table = score_table(class_scores(confusion, ["no", "yes"])).splitlines()
    assert table[0].split() == ["precision", "recall", "f1", "support"]
    assert table[1].split() == ["no", "100.00", "75.00", "85.71", "4"]
    assert table[3].split() == ["micro", "avg", "87.50", "87.50", "87.50", "8"]
    assert [line.split()[0] for line in table[2:]] == ["yes", "micro", "macro", "weighted"]


@pytest.mark.parametrize(
    ("tags", "spans"),
    [
        ("B-P I-P O B-L", [("P", 0, 2), ("L", 3, 4)]),
        ("I-P I-P", [("P", 0, 2)]),
        ("O I-P B-P I-P", [("P", 1, 2), ("P", 2, 4)]),
        ("B-P I-L I-L", [("P", 0, 1), ("L", 1, 3)]),
        ("B-P B-P", [("P", 0, 1), ("P", 1, 2)]),
        ("S-P B-P I-P E-P I-P", [("P", 0, 1), ("P", 1, 4), ("P", 4, 5)]),
        ("B-a-b I-a-b I-a", [("a-b", 0, 2), ("a", 2, 3)]),
        ("B I O I I", [("", 0, 2), ("", 3, 5)]),
        ("PER PER LOC O PER", [("PER", 0, 2), ("LOC", 2, 3), ("PER", 4, 5)]),
        ("O O", []),
        ("", []),
    ],
)
def test_entities_begin_and_end_as_conlleval_says(tags, spans):
    assert [*entities(tags.split())] == spans


@pytest.mark.parametrize(
    ("scheme", "tags"),
    [
        ("BILOU", "U-P U-P O B-P I-P L-P U-L"),
        ("BMES", "S-P W-P O B-P M-P E-P S-L"),
        ("BIOES", "S-P S-P O B-P I-P E-P S-L"),
        ("BIO", "B-P B-P O B-P I-P I-P B-L"),
    ],
)
def test_schemes_spell_the_same_entities(scheme, tags):
    expected = [("P", 0, 1), ("P", 1, 2), ("P", 3, 6), ("L", 6, 7)]
    assert [*entities(tags.split(), scheme)] == expected
    predicted = [*tags.split()[:1], "O", *tags.split()[2:]]
    score = entity_scores([predicted], [tags.split()], scheme=scheme)["micro avg"]
    assert (score.precision, score.recall) == (1, 0.75)


def test_without_a_scheme_labels_are_types():
    assert [*entities(["B-P", "I-P", "O", "U"], "types")] == [
        *(("B-P", 0, 1), ("I-P", 1, 2), ("U", 3, 4)),
    ]


def test_the_macro_average_of_entities_counts_predicted_types_if_asked_for():
    tags = [["B-X", "O"]], [["B-X", "B-Y"]]
    assert entity_scores(*tags)["macro avg"].f1 == 0.5
    swapped = [["B-X", "B-Y"]], [["B-X", "O"]]
    assert entity_scores(*swapped)["macro avg"].f1 == 1
    assert entity_scores(*swapped, macro_average="all")["macro avg"].f1 == 0.5


# conlleval's rules: pairs of prefixes between which an entity begins, or ends, whatever the types.
BEGINS = {
    *[
        "BB",
        "IB",
        "OB",
        "OI",
        "EE",
        "EI",
        "EB",
        "OE",
        "SE",
        "SI",
        "SB",
        "BS",
        "IS",
        "OS",
        "ES",
        "SS",
    ]
}
ENDS = {
    *[
        "BB",
        "BO",
        "IB",
        "IO",
        "EE",
        "EI",
        "EO",
        "EB",
        "SE",
        "SI",
        "SO",
        "SB",
        "BS",
        "IS",
        "ES",
        "SS",
    ]
}


def conlleval(tags):
    """Return the entities of a sentence by the tables of conlleval."""
    found, start = [], None
    parts = [("O", ""), *(tuple(f"{tag}-".split("-")[:2]) for tag in tags), ("O", "")]
    for i, (before, here) in enumerate(zip(parts, parts[1:], strict=False)):
        pair, changes = before[0] + here[0], before[1] != here[1]
        if start is not None and (pair in ENDS or (before[0] != "O" and changes)):
            found.append((before[1], start, i))
            start = None
        if pair in BEGINS or (here[0] != "O" and changes):
            start = i
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_entity_scores_equal_a_second_implementation(seed):
    rng = np.random.default_rng(seed)
    alphabet = [*"BIESBI"] if seed % 2 else [*"BBII"]
    choices = ["O", "O", *(f"{prefix}-{kind}" for prefix in alphabet for kind in ("X", "Y", "Z"))]
    sizes = rng.integers(0, 12, 15)
    predictions, labels = ([rng.choice(choices, n).tolist() for n in sizes] for _ in range(2))
    predictions[0], labels[0] = ["B-X", "I-X"], ["B-X", "I-X"]
    found = {(i, *e) for i, tags in enumerate(predictions) for e in conlleval(tags)}
    true = {(i, *e) for i, tags in enumerate(labels) for e in conlleval(tags)}
    scores = entity_scores(predictions, labels)
    expected = Score.of(len(found & true), len(found), len(true))
    assert scores["micro avg"] == expected
    of_x = [{e for e in spans if e[1] == "X"} for spans in (found & true, found, true)]
    assert scores["X"] == Score.of(*map(len, of_x))


def test_predictions_must_fit_the_sentences():
    with problem("1 predictions … 2 labels", ValueError):
        entity_scores([["O"]], [["O", "O"]])
