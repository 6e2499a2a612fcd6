"""Column files as published: separators, comments, numbered words, headers, and what is refused."""

import pytest
from problems import problem

from megatron.common.errors import WrongDataError
from megatron.extensions.tasks.data.columns import Layout
from megatron.extensions.tasks.data.tagging import read_sentences

CONLL_U = """\
# sent_id = 1
# text = We go to the market
1\tWe\twe\tPRON\t_\t_
2-3\tgoto\t_\t_\t_\t_
2\tgo\tgo\tVERB\t_\t_
3\tto\tto\tADP\t_\t_
3.1\tnull\tnull\tX\t_\t_

# sent_id = 2
1\tYes\tyes\tINTJ\t_\t_
"""
GERMEVAL = """\
#\thttp://de.wikipedia.org/wiki/X\t[2010-01-01]
1\tAnna\tB-PER\tO
2\tReal\tB-ORG\tO
3\tMadrid\tI-ORG\tB-LOC

#\thttp://de.wikipedia.org/wiki/Y\t[2010-01-01]
1\tJa\tO\tO
"""


@pytest.fixture
def read(tmp_path):
    def of(content, *, labelled=True, **layout):
        (tmp_path / "a.conll").write_text(content)
        found = read_sentences(tmp_path / "a.conll", labelled=labelled, layout=Layout(**layout))
        return [(" | ".join(s.words), " ".join(s.labels), s.line) for s in found]

    return of


def test_words_between_tabs_keep_their_spaces(read):
    text = "New York\tNNP\tB-LOC\nis\tVB\tO\n\n10\u00a0000\tCD\tO\t\n"
    assert read(text) == [("New York | is", "B-LOC O", 1), ("10\u00a0000", "O", 4)]
    assert read("10\u00a0000  CD \t B-X\nis VB O\n", separator="space") == [
        ("10\u00a0000 | is", "B-X O", 1)
    ]


def test_comments_in_front_of_sentences_are_no_words(read, caplog):
    caplog.set_level("INFO")
    multiconer = (
        "# id 5bd1\tdomain=en\nthe _ _ O\ncat _ _ B-X\n\n# id 7 domain=en\n# _ _ O\nX _ _ B-X\n"
    )
    assert read(multiconer) == [("the | cat", "O B-X", 2), ("# | X", "O B-X", 6)]
    assert "2 lines that begin with # are comments" in caplog.text
    assert read("#MeToo B-EVENT\nis O\n# O\n") == [("#MeToo | is | #", "B-EVENT O O", 1)]


def test_columns_that_number_words_need_flags(read):
    message = "line 3 … numbers … --text-column … --label-column"
    for options in ({}, {"text": 2}, {"label": 4}):
        with problem(message, WrongDataError):
            read(CONLL_U, **options)
    assert read(CONLL_U, text=2, label=4) == [
        ("We | go | to", "PRON VERB ADP", 3),
        ("Yes", "INTJ", 10),
    ]
    with problem("line 2 … numbers", WrongDataError):
        read(GERMEVAL)
    assert read(GERMEVAL, text=2, label=3) == [
        ("Anna | Real | Madrid", "B-PER B-ORG I-ORG", 2),
        ("Ja", "O", 7),
    ]


def test_a_header_is_no_word(read):
    text = "Token\tTag\nAnna\tB-PER\n"
    assert read(text) == [("Anna", "B-PER", 2)]
    assert read(text, has_header=False) == [("Token | Anna", "Tag B-PER", 1)]
    assert read("Wort Art\nAnna B-PER\n", has_header=True) == [("Anna", "B-PER", 2)]


def test_flags_name_the_columns(read):
    text = "O\twhat\nB-GENRE\tcomedy\n"
    with problem("first column … B-GENRE", WrongDataError):
        read(text)
    assert read(text, text=2, label=1) == [("what | comedy", "O B-GENRE", 1)]
    with problem("column 2 … --label-column", WrongDataError):
        read("a x\nb y\n", text=2)
    assert read("a 1 x\nb 2 y z\n", text=1, label=3) == [("a | b", "x y", 1)]
    with problem("line 2 … 2 columns … 3", WrongDataError):
        read("a 1 x\nb 2\nc 3 y\n", text=1, label=3, labelled=False)
    assert read("x\ny\n", labelled=False) == [("x | y", "", 1)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("New York B-LOC\nis O\nin O\n", "line 1 … 3 columns … 2"),
        ("x\tO\ny O\n", "line 2 … 'y O' … --column-separator tab"),
        ("x\tO\n\tO\n", "line 2 … empty"),
        ("x _\ny _\n", "last column … --text-column"),
        ("#begin document (a); part 0\na 0 x y\nb 1 y z\n", "line 1 … 5 columns"),
    ],
)
def test_files_whose_columns_are_in_doubt_are_refused(read, tmp_path, text, words):
    with problem(f"{tmp_path}/a.conll, … {words}", WrongDataError):
        read(text)
