"""Decontamination: every planted n-gram goes, and nothing else does."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import problem
from texts import english

from megatron.common.errors import DataError
from megatron.common.process_pool import ordered_map
from megatron.extensions.corpora.cleaning.evaluations import EVALUATIONS, evaluation_texts
from megatron.extensions.corpora.cleaning.ngrams import (
    CountNgrams,
    CutDocuments,
    CutRules,
    NgramSet,
    pieces_around,
    words_of,
)
from megatron.extensions.corpora.cleaning.records import Line

PLANTED = [f"secret{i}" for i in range(13)]
QUESTION = " ".join(PLANTED)


def line(text):
    return Line("in.jsonl", 1, 0, json.dumps({"text": text, "url": "u"}).encode())


def cut(text, ngrams=(QUESTION,), **rules):
    function = CutDocuments(NgramSet(ngrams), "text", "lambada", CutRules(**rules))
    (done,) = function((5, [line(text)]))
    return done, [json.loads(piece) for piece in done.pieces]


def test_a_document_without_ngrams_keeps_its_bytes():
    done, _ = cut("Short. " + " ".join(PLANTED[:12]))
    assert done.pieces == (line("Short. " + " ".join(PLANTED[:12])).raw,)
    assert not done.was_cut


def test_both_flanks_of_a_planted_ngram_stay():
    before, after = english(1, 20), english(2, 20)
    done, pieces = cut(f"{before} Now {QUESTION.upper()}! {after}")
    assert [piece["split_id"] for piece in pieces] == [
        "lambada-0000000005-0000",
        "lambada-0000000005-0001",
    ]
    left, right = (piece["text"] for piece in pieces)
    assert before.startswith(left) and left.endswith(".")
    assert after.endswith(right) and right[0].isupper()
    longest_sentence = max(map(len, before.split(".") + after.split(".")))
    assert 200 <= len(before) - len(left) <= 200 + longest_sentence + 10
    assert 200 <= len(after) - len(right) <= 200 + longest_sentence + 10
    assert all(piece["url"] == "u" for piece in pieces)
    assert done.was_cut


@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from([",", " -- ", "\n", " "])), min_size=1),
    st.integers(0, 30),
)
def test_every_planted_ngram_goes_and_nothing_else(parts, margin):
    """Sentences are planted ones or not; with a margin, neighbours go whole or stay whole."""
    clean = [f"Here is sentence number {i} of this text." for i in range(len(parts))]
    sentences = [
        separator.join(PLANTED).capitalize() + "." if planted else clean[i]
        for i, (planted, separator) in enumerate(parts)
    ]
    _, pieces = cut(" ".join(sentences), margin=margin, min_chars=0, max_pieces=1000)
    kept = " ".join(piece["text"] for piece in pieces)
    assert "secret" not in kept.lower()
    is_planted = [planted for planted, _ in parts]
    for i, sentence in enumerate(clean):
        beside_planted = any(is_planted[max(i - 1, 0) : i + 2])
        if not is_planted[i] and not (margin and beside_planted):
            assert sentence in kept
    if not any(is_planted):
        assert kept == " ".join(sentences)


def test_letters_that_grow_in_lower_case_do_not_move_the_cut():
    before = "İstanbul İİİİİİİİİİ. " * 20
    _, (piece,) = cut(before + QUESTION + ".", margin=0)
    assert piece["text"] == before.strip()
    assert words_of("İ a") == ["i\u0307", "a"]


def test_short_pieces_and_shattered_documents_go():
    text = f"{english(1, 2)} {QUESTION}. {english(2, 20)}"
    _, pieces = cut(text)
    assert len(pieces) == 1
    shattered = f" {QUESTION}. ".join(english(seed, 20) for seed in range(4))
    assert len(cut(shattered, max_pieces=4)[1]) == 4
    done, pieces = cut(shattered, max_pieces=3)
    assert (pieces, done.had_too_many) == ([], True)


def test_the_gap_between_words_counts_as_part_of_the_ngram():
    spread = ("," + " " * 40).join(PLANTED)
    _, pieces = cut(f"{english(1, 20)} {spread}. {english(2, 20)}", margin=0)
    assert len(pieces) == 2
    assert not any("secret" in piece["text"] for piece in pieces)


def test_ends_of_sentences_bound_the_cut():
    text = "One is. Two was? Three!"
    assert pieces_around(text, [(8, 11)], 0) == ["One is.", "Three!"]
    assert pieces_around(text, [(0, 3), (17, 22)], 0) == ["Two was?"]
    assert pieces_around("no end at all", [(3, 6)], 0) == []


@pytest.mark.parametrize(
    ("count", "expected"),
    [(7, 0), (8, 1), (12, 1), (13, 1), (14, 2), (20, 8)],
)
def test_ngrams_of_an_evaluation(count, expected):
    words = [f"w{i}" for i in range(count)]
    found = CutRules().ngrams_of([", ".join(words).upper()])
    assert found == [" ".join(words[i : i + 13]) for i in range(expected)]


@given(
    st.lists(st.lists(st.sampled_from("abc"), min_size=2, max_size=4), max_size=5),
    st.lists(st.sampled_from("abc")),
)
def test_matches_are_all_occurrences(ngrams, words):
    text = " ".join(words)
    found = sorted(NgramSet({" ".join(ngram) for ngram in ngrams}).matches(text))
    assert found == sorted(
        (" ".join(ngram), 2 * i, 2 * (i + len(ngram)) - 1)
        for ngram in {tuple(ngram) for ngram in ngrams}
        for i in range(len(words))
        if tuple(words[i : i + len(ngram)]) == ngram
    )


def test_occurrences_are_counted():
    counts = CountNgrams(NgramSet([QUESTION]), "text")([line(f"{QUESTION}. {QUESTION}")] * 3)
    assert counts == {QUESTION: 6}


def test_what_is_sent_to_workers_works_there():
    text = f"{english(1, 20)} {QUESTION}. {english(2, 20)}"
    ngrams = NgramSet([QUESTION])
    count = CountNgrams(ngrams, "text")
    function = CutDocuments(ngrams, "text", "lambada")
    batches = [[line(text)], [line("other")], [line(QUESTION)]]
    assert list(ordered_map(count, batches, 2)) == [{QUESTION: 1}, {}, {QUESTION: 1}]
    numbered = list(enumerate(batches))
    assert list(ordered_map(function, numbered, 2)) == [function(batch) for batch in numbered]


@pytest.mark.parametrize("task", EVALUATIONS)
def test_every_evaluation_reads_a_file(task, write):
    key = EVALUATIONS[task].key
    path = write("task.jsonl", [{key: "What is it?"}, {key: {"text": "And this?"}}])
    assert list(evaluation_texts(task, path)) == ["What is it?", "And this?"]
    with problem(f"task.jsonl, line 1 … '{key}'", DataError):
        list(evaluation_texts(task, write("task.jsonl", [{"other": 1}])))


def test_an_evaluation_without_a_source_is_named(modules):
    with problem("--tasks lambada … --lambada-path"):
        list(evaluation_texts("lambada", None))
    modules("datasets")
    with problem("--task-files squad FILE"):
        list(evaluation_texts("squad", None))
