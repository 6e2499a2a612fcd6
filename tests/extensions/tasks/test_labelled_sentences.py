"""Text classification: sentences and labels in columns, headers, malformed lines, scores, weights."""

import math

import numpy as np
import pytest
from encoders import tokenizer_in
from problems import problem

from megatron.common.errors import WrongDataError
from megatron.extensions.tasks.data.columns import BY_LOOK, Layout
from megatron.extensions.tasks.data.sentences import read_labelled_sentences, sentence_labels
from megatron.extensions.tasks.data.task import Predicted
from megatron.extensions.tasks.data.tasks import task_of
from megatron.extensions.tasks.data.text_flags import TextTaskPlan


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
    assert sentence_labels([path]) == ["0", "1", "2"]
    assert sentence_labels([path], 4) == ["0", "1", "2", "3"]


def test_a_header_is_left_out(file):
    path = file("sentence\tlabel\na good film\t1\n")
    assert read(path) == [("a good film", 1, 0)]
    assert sentence_labels([path]) == ["0", "1"]


def test_a_misspelt_label_in_the_first_line_is_no_header(file):
    with problem("line 1 … label 'godo'", WrongDataError):
        read(file("a film\tgodo\nbad\tbad\n"), ("good", "bad"))
    path = file("text\tclass\na film\tgood\nbad\tbad\n")
    assert read(path, ("good", "bad")) == [("a film", 0, 0), ("bad", 1, 1)]
    assert sentence_labels([path]) == ["bad", "good"]


def test_a_single_line_is_no_header(file):
    path = file("what it aims at\ttarget\n")
    assert sentence_labels([path]) == ["target"]
    assert read(path, ("source", "target")) == [("what it aims at", 1, 0)]
    with problem("line 1 … label 'target'", WrongDataError):
        read(path, ("0", "1"))


def test_labels_by_name_or_number(file):
    path = file("x inhibits y\tCPR:4\nx and y\tfalse\nz\t1\n")
    assert [label for _, label, _ in read(path, ("false", "CPR:4"))] == [1, 0, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\t0\nb\n", "line 2: 'b' is not a sentence followed by a tab"),
        ("a\t0\n\t1\n", "line 2: '\\t1' is not a sentence"),
        ("a\t0\nb\t7\n", "line 2: unknown label '7'"),
        ("a\t0\nb\tgood\n", "line 2: unknown label 'good'"),
        ("sentence\tlabel\n", "has no sentence"),
    ],
)
def test_malformed_lines_are_named(file, text, message):
    with pytest.raises(WrongDataError) as caught:
        read(file(text))
    assert message in str(caught.value)


def test_labels_are_numbers_or_names(file):
    assert sentence_labels([file("a\tgood\nb\tbad\n")]) == ["bad", "good"]
    with problem("line 2 … 'good' … number", WrongDataError):
        sentence_labels([file("a\t0\nb\tgood\nc\t1\n")])


def named(path, layout=BY_LOOK):
    """Return sentences and names of their labels, which are those of the file."""
    labels = sentence_labels([path], None, layout)
    found = read_labelled_sentences(path, labels, layout).examples
    return [(e.firsts[0], labels[int(e.label)]) for e in found]


ROWS = [("a film", "pos"), ("b film", "neg"), ("c film", "pos"), ("d film", "neg")]


@pytest.mark.parametrize(
    ("header", "row"),
    [
        ("text\tsentiment", "{}\t{}"),
        ("label\tsentence", "{1}\t{0}"),
        ("id\tText\tIntent", "7\t{}\t{}"),
    ],
)
def test_a_header_of_other_names_names_the_columns(file, header, row):
    lines = [header, *(row.format(*each) for each in ROWS)]
    assert named(file("\n".join(lines) + "\n")) == ROWS


@pytest.mark.parametrize("sentence", ["Satz", "der Satz"])
def test_a_first_line_in_doubt_is_refused_with_the_flag_that_decides(file, sentence):
    path = file(f"{sentence}\tStimmung\n" + "".join(f"{t}\t{label}\n" for t, label in ROWS))
    with problem("line 1 … 'Stimmung' … --header yes … --header no", WrongDataError):
        sentence_labels([path])
    with problem("pos, neg … --header yes", WrongDataError):
        read(path, ("pos", "neg"))
    assert named(path, Layout(has_header=True)) == ROWS
    assert named(path, Layout(has_header=False)) == [(sentence, "Stimmung"), *ROWS]


def test_a_rare_label_in_a_later_line_is_no_doubt(file):
    rows = [*ROWS, ("e film", "mixed")]
    assert named(file("".join(f"{text}\t{label}\n" for text, label in rows))) == rows


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1\ta film\n0\tb film\n1\tc film\n", "labels, 3, than sentences"),
        ("a\t1.0\nb\t0.0\n", "label 1.0 … 0, 1"),
        ("a\t-1\nb\t1\n", "label -1 … 0, 1"),
        ('"a"\t"pos"\n"b"\t"neg"\n', 'label "pos" … quotes'),
        ("a\t100000\nb\t0\n", "100000 … 100001 classes … --num"),
        ("7\ta\tpos\n8\tb\tneg\n", "3 columns … --text-column … --label-column"),
    ],
)
def test_labels_in_doubt_are_refused(file, text, words):
    with problem(words, WrongDataError):
        sentence_labels([file(text)])


def test_flags_name_the_columns_of_sentence_and_label(file):
    assert named(file("1\ta film\n0\tb film\n1\tc film\n"), Layout(text=2, label=1)) == [
        *(("a film", "1"), ("b film", "0"), ("c film", "1")),
    ]
    assert named(file("7\ta\tpos\n8\tb\tneg\n"), Layout(text=2)) == [("a", "pos"), ("b", "neg")]
    with problem("column 2 … both", WrongDataError):
        named(file("a\tpos\n"), Layout(text=2))


def test_tabs_inside_of_some_sentences_are_spaces(file):
    assert named(file("a\tb\tpos\nc\tneg\n")) == [("a b", "pos"), ("c", "neg")]


RELATIONS = {
    "named columns": "index\tsentence\tlabel\n9.T1.T2\t@CHEMICAL$ blocks  @GENE$\tCPR:4\n"
    "9.T1.T3\t@CHEMICAL$ and @GENE$\tfalse\n",
    "four columns": "9\t@CHEMICAL$ blocks @GENE$\tTrue\tCPR:4\n9\t@CHEMICAL$ and @GENE$\tfalse\tCPR:1\n",
}


@pytest.mark.parametrize("form", RELATIONS)
def test_files_of_relations(form, file):
    path = file(RELATIONS[form])
    assert sentence_labels([path]) == ["CPR:4", "false"]
    assert read(path, ("CPR:4", "false")) == [
        ("@CHEMICAL$ blocks @GENE$", 0, 0),
        ("@CHEMICAL$ and @GENE$", 1, 1),
    ]
    with problem(r"'a\tb' … 2 columns", WrongDataError):
        read(file(f"{RELATIONS[form]}\na\tb\n"), ("CPR:4", "false"))


def data_of(folder, text, **options):
    (folder / "train.tsv").write_text(text)
    plan = TextTaskPlan(labels=("a", "b", "none"), **options)
    task = task_of("text-classification", plan)
    tokenizer = tokenizer_in(folder)
    data = task.data([folder / "train.tsv"], tokenizer=tokenizer, seq_length=6, trains=True)
    return task, data


def test_rare_labels_weigh_more_in_the_loss(tmp_path):
    text = "a\ta\nb\tnone\nc\tnone\na b\tnone\n"
    _, data = data_of(tmp_path, text)
    assert [float(item["label_weight"]) for item in map(data.__getitem__, range(4))] == [1] * 4
    _, data = data_of(tmp_path, text, balances_classes=True)
    weights = [float(data[i]["label_weight"]) for i in range(4)]
    # 4 sentences, 2 labels that occur, 1 and 3 sentences of each.
    np.testing.assert_allclose(weights, [4 / 2 / 1] + [4 / 2 / 3] * 3, rtol=1e-6)


def test_a_long_sentence_is_reported(tmp_path, caplog):
    data_of(tmp_path, "a b c a b\ta\nb\tnone\n")
    assert "train: 1 of 2 examples of text-classification lose the ends" in caplog.text


def test_the_score_of_relations_leaves_out_the_negative_label(tmp_path):
    from sklearn.metrics import precision_recall_fscore_support

    draw = np.random.default_rng(0)
    names = ("a", "b", "none")
    labels = draw.integers(0, 3, 60)
    text = "".join(f"a b\t{names[label]}\n" for label in labels)
    task, data = data_of(tmp_path, text, negative_label="none")
    outputs = draw.normal(size=(60, 3))
    metrics = task.metrics([Predicted(data, outputs)])
    expected = precision_recall_fscore_support(
        labels, outputs.argmax(1), labels=[0, 1], average="micro"
    )[:3]
    found = [metrics[f"relation {name}"] for name in ("precision", "recall", "f1")]
    np.testing.assert_allclose(found, expected)
    assert task.score(metrics) == metrics["relation f1"]
    task, data = data_of(tmp_path, text)
    metrics = task.metrics([Predicted(data, outputs)])
    assert {*metrics} == {"accuracy"} and math.isclose(task.score(metrics), metrics["accuracy"])
