"""Text classification: lines of a sentence and a label, headers, and malformed lines."""

import pytest

from megatron.common.errors import WrongDataError
from megatron.data.downstream.sentences import count_labels, read_labelled_sentences


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "train.tsv"
        path.write_text(text)
        return path

    return write


def read(path, labels=("0", "1", "2")):
    return [(e.firsts[0], e.label, e.uid) for e in read_labelled_sentences(path, labels).examples]


def test_sentences_with_numbers(file):
    path = file("a good  film\t1\nbad\t0\n\nso so\t2\n")
    assert read(path) == [("a good film", 1, 0), ("bad", 0, 1), ("so so", 2, 2)]
    assert count_labels([path]) == 3


def test_a_header_is_left_out(file):
    path = file("sentence\tlabel\na good film\t1\n")
    assert read(path) == [("a good film", 1, 0)]
    assert count_labels([path]) == 2


def test_labels_by_name_or_number(file):
    path = file("x inhibits y\tCPR:4\nx and y\tfalse\nz\t1\n")
    assert [label for _, label, _ in read(path, ("false", "CPR:4"))] == [1, 0, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\t0\nb\n", "line 2: 'b' is no sentence with a tab"),
        ("a\t0\n\t1\n", "line 2: '\\t1' is no sentence"),
        ("a\t0\nb\t7\n", "line 2: unknown label '7'"),
        ("a\t0\nb\tgood\n", "line 2: unknown label 'good'"),
        ("sentence\tlabel\n", "has no sentence"),
    ],
)
def test_malformed_lines_are_named(file, text, message):
    with pytest.raises(WrongDataError) as caught:
        read(file(text))
    assert message in str(caught.value)


def test_names_of_labels_are_needed(file):
    with pytest.raises(WrongDataError, match="line 2: the label 'good' is not a number; give"):
        count_labels([file("a\t0\nb\tgood\n")])
