"""What is done to one text, and in which order."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import problem
from texts import FRENCH, english
from tokenizers import ByteLevelBPETokenizer

from megatron.common.process_pool import ordered_map
from megatron.extensions.corpora.cleaning.records import Line
from megatron.extensions.corpora.cleaning.repair import (
    TASKS,
    CleanDocuments,
    RunTasks,
    collapse_spaces,
    fix_text,
    gpt2_counter,
    is_english,
    piece_counter,
)

LONG = english(0)


def line(text, **more):
    return Line("in.jsonl", 1, 0, json.dumps({"text": text, **more}).encode())


def run_tasks(text, *tasks):
    (outcome,) = RunTasks(tasks)([line(text)])
    return json.loads(outcome.line)["text"], outcome.dropped_by, outcome.changed_by


@pytest.mark.parametrize(
    ("task", "kept", "dropped"),
    [
        ("remove_512", "x" * 512, "x" * 511),
        ("remove_256_javascript", "JavaScript".ljust(256), "Enable JavaScript".ljust(255)),
        ("remove_512_non_english", LONG[:511], FRENCH[:511]),
        ("remove_512_non_english", FRENCH[:512], FRENCH[:300]),
    ],
)
def test_filters_drop_up_to_their_bound(task, kept, dropped):
    assert run_tasks(kept, task) == (kept, None, ())
    assert run_tasks(dropped, task) == (dropped, task, ())


def test_both_fixes_are_done():
    done = run_tasks("schÃ¶n   and\n\nlong", "ftfy_fix_text", "general_cleaning")
    assert done == ("schön and long", None, ("ftfy_fix_text", "general_cleaning"))


def test_tasks_are_done_in_the_order_given():
    text = " ".join(["word"] * 103) + "  "  # 516 characters, of which one goes
    spaced = text.replace("word word", "word      word", 1)
    assert run_tasks(spaced, "remove_512", "general_cleaning")[1] is None
    short = "word" + " " * 509
    assert run_tasks(short, "remove_512", "general_cleaning")[1] is None
    assert run_tasks(short, "general_cleaning", "remove_512")[1] == "remove_512"


def test_what_is_dropped_stays_as_it_was():
    text = "schÃ¶n"
    assert run_tasks(text, "ftfy_fix_text", "remove_512")[:2] == (text, "remove_512")


def test_an_unchanged_line_keeps_its_bytes():
    raw = b'{"text":   "\\u0066ine", "n": 1e2}'
    assert RunTasks(tuple(TASKS)[3:])([Line("x", 1, 0, raw)])[0].line == raw


@given(st.text(alphabet="ab \n."))
def test_collapsing_loses_spaces_only_and_leaves_no_run_of_them(text):
    done = collapse_spaces(text)
    assert done.split() == text.split()
    assert "  " not in done.replace("\n", "x")


@pytest.mark.parametrize(
    ("text", "english"),
    [
        (LONG, True),
        ("Please enable JavaScript to view this page.", True),
        (FRENCH, False),
        ("Der schnelle braune Fuchs springt über den faulen Hund.", False),
        ("El alcalde dijo el martes que el puente nuevo se abrirá en primavera.", False),
        ("敏捷的棕色狐狸跳过了懒狗", False),
        ("", False),
        ("12345 67890", False),
    ],
)
def test_english_is_distinguished_from_the_rest_every_time(text, english):
    assert {is_english(text) for _ in range(3)} == {english}


def clean(text):
    (outcome,) = CleanDocuments(piece_counter)([line(text, url="u")])
    return outcome


def test_documents_are_mended_and_chosen():
    assert clean(LONG).line == line(LONG, url="u").raw
    assert clean(FRENCH).dropped_by == "not English"
    mended = clean(LONG + " It was schÃ¶n.")
    assert json.loads(mended.line) == {"text": LONG + " It was schön.", "url": "u"}
    assert mended.changed_by == ("fixed",)


def test_tokens_are_counted_only_where_they_may_be_too_few():
    of_127 = " ".join(["the"] * 127)
    assert clean(of_127).dropped_by == "small"
    assert clean(of_127 + " the").dropped_by is None
    few_but_long = "the of and to in is was " + "a" * 1100
    assert clean(few_but_long).dropped_by != "small"


def test_cleaning_is_the_same_in_other_processes():
    batches = [[line(LONG), line(FRENCH)], [line("short")], [line("schÃ¶n " + LONG)]]
    for function in (CleanDocuments(piece_counter), RunTasks(tuple(TASKS))):
        assert list(ordered_map(function, batches, 2)) == [function(batch) for batch in batches]


def test_pieces_are_a_lower_bound_of_tokens(tmp_path):
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([LONG], vocab_size=400, show_progress=False)
    tokenizer.save_model(str(tmp_path))
    exact = gpt2_counter(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    for text in [LONG, FRENCH, "", "it's 12,000 %\n\n x"]:
        assert piece_counter()(text) <= exact(text) <= len(text.encode())
    assert piece_counter()("it's here, 2 of 3") == 7


def test_a_package_of_cleaning_that_is_missing_is_named(modules):
    modules("ftfy")
    with problem("encodings … pip install ftfy"):
        fix_text("text")
