"""Scores of answers follow the official evaluation of SQuAD."""

import math
import random

import numpy as np
import pytest
from problems import problem
from squad_files import asked

from megatron.extensions.tasks.data.squad_scores import answer_f1, exact_match, squad_scores


@pytest.mark.parametrize(
    ("prediction", "gold", "exact", "f1"),
    [
        ("The Cat's hat!", "cats hat", 1, 1),
        ("a red red car", "red car", 0, 0.8),
        ("", "the", 1, 1),
        ("an", "apple", 0, 0),
        ("U.S.", "US", 1, 1),
        ("in 1999", "1999", 0, 2 / 3),
        ("A-B", "a b", 0, 0),
        ("\u201cthe\u201d x", "\u201c \u201d x", 1, 1),
    ],
)
def test_exact_match_and_f1(prediction, gold, exact, f1):
    assert exact_match(prediction, [gold]) == exact
    assert answer_f1(prediction, [gold]) == pytest.approx(f1, abs=1e-12)


def words_of(text):
    """Normalize a text letter by letter."""
    return "".join(c for c in text.lower() if c.isalnum() or c.isspace()).split()


@pytest.mark.parametrize("seed", range(20))
def test_scores_equal_a_second_implementation(seed):
    rng = np.random.default_rng(seed)
    words = ["a", "The", "an", "x", "X.", "y", "!", "z-z", "zz", "1,000"]
    prediction, *answers = (" ".join(rng.choice(words, rng.integers(0, 5))) for _ in range(4))

    def bag(text):
        return [w for w in words_of(text) if w not in ("a", "an", "the")]

    best, is_exact, guessed = 0, False, bag(prediction)
    for right in [each for each in map(bag, answers) if each] or [[]]:
        rest, same = [*right], 0
        for word in guessed:
            if word in rest:
                rest.remove(word)
                same += 1
        total = len(guessed) + len(right)
        best = max(best, 2 * same / total if total else 1)
        is_exact |= guessed == right
    assert exact_match(prediction, answers) == is_exact
    assert answer_f1(prediction, answers) == pytest.approx(best, abs=1e-12)


def test_the_best_answer_counts():
    assert exact_match("b", ["a x", "b", "the"]) == 1
    assert exact_match("", ["b", "the"]) == 0
    assert answer_f1("x y", ["x", "z", "y x y"]) == pytest.approx(0.8)


def test_scores_of_a_file():
    questions = [
        asked("red car", "red car", uid="1"),
        asked("x", uid="2"),
        asked("x", uid="3"),
        asked("blue", "blue", uid="4"),
    ]
    predictions = {"1": "a red red car", "2": "", "3": "x", "4": ""}
    scores = squad_scores(predictions, questions)
    assert scores == pytest.approx(
        {
            **{"exact": 25, "f1": 45, "total": 4},
            **{"HasAns_exact": 0, "HasAns_f1": 40, "HasAns_total": 2},
            **{"NoAns_exact": 50, "NoAns_f1": 50, "NoAns_total": 2},
        }
    )
    best = squad_scores(predictions, questions, null_odds={"1": -3, "2": 0, "3": 2, "4": 1})
    assert best["best_exact"] == 50 and best["best_exact_thresh"] == 0
    assert best["best_f1"] == pytest.approx(70) and best["best_f1_thresh"] == -3
    with problem("1 questions … prediction … '4'", ValueError):
        squad_scores({"1": "", "2": "", "3": ""}, questions)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", ["exact", "f1"])
def test_the_best_threshold_is_that_of_a_search(seed, name):
    draw = random.Random(seed)
    questions = [
        asked("red car", "red car" if draw.random() < 0.6 else None, uid=str(i)) for i in range(9)
    ]
    answers = {q.uid: draw.choice(["", "red car", "a red van"]) for q in questions}
    odds = {q.uid: draw.gauss(0, 1) for q in questions}

    def score(threshold):
        kept = {uid: "" if odds[uid] > threshold else text for uid, text in answers.items()}
        return squad_scores(kept, questions)[name]

    found = squad_scores(answers, questions, null_odds=odds)
    assert found[f"best_{name}"] == pytest.approx(max(map(score, [-math.inf, *odds.values()])))
