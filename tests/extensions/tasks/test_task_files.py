"""Files of GLUE and RACE: which columns and keys are read, and errors by file and line."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from problems import problem

from megatron.common.errors import WrongDataError
from megatron.extensions.tasks.data.task_dataset import TaskDataset
from megatron.extensions.tasks.data.tasks import TASKS
from megatron.tokenizer.types.wordpiece import WordPieceTokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh", "?", "."]


def tokenizer_in(folder):
    (folder / "vocabulary").write_text("\n".join(WORDS))
    return WordPieceTokenizer(folder / "vocabulary", lower_case=True)


def row(length, **fields):
    """Return a line of `length` columns; c0="x" is column 0, others hold "-"."""
    columns = ["-"] * length
    for name, text in fields.items():
        columns[int(name[1:])] = text
    return "\t".join(columns)


def header(length):
    return row(length, c0="index")


TRAINING = {
    "MNLI": [header(12), row(12, c0="7", c8="a b", c9="c", c11="neutral")],
    "QQP": [row(6, c0="id"), row(6, c0="7", c3="a b", c4="c", c5="1")],
    "QNLI": [header(4), "7\ta b\tc\tnot_entailment"],
    "RTE": [header(4), "7\ta b\tc\tentailment"],
    "SST-2": ["sentence\tlabel", "a b\t0", "c\t1"],
    "CoLA": ["gj04\t1\t\ta b", "gj04\t0\t*\tc"],
    "STS-B": [header(10), row(10, c0="7", c7="a b", c8="c", c9="3.25")],
    "MRPC": ["\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String", "1\t70\t71\ta b\tc"],
}
TEST = {
    "MNLI": [header(10), row(10, c0="8", c8="a", c9="b")],
    "QQP": ["id\tquestion1\tquestion2", "8\ta\tb"],
    "QNLI": [header(3), "8\ta\tb"],
    "RTE": [header(3), "8\ta\tb"],
    "SST-2": [header(2), "8\ta"],
    "CoLA": [header(2), "8\ta"],
    "STS-B": [header(9), row(9, c0="8", c7="a", c8="b")],
    "MRPC": [header(5), "8\t70\t71\ta\tb"],
}
EXPECTED = {
    "MNLI": [(7, 2)],
    "QQP": [(7, 1)],
    "QNLI": [(7, 1)],
    "RTE": [(7, 0)],
    "SST-2": [(0, 0), (1, 1)],
    "CoLA": [(0, 1), (1, 0)],
    "STS-B": [(7, 3.25)],
    "MRPC": [(0, 1)],
}
"""Number and label of each example of TRAINING."""


def write(path, lines, end="\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((end.join(lines) + end).encode())
    return path


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_training_file_is_read(tmp_path, name, end):
    file = write(tmp_path / f"{name}/train_1.tsv", [*TRAINING[name], ""], end)
    dataset = TaskDataset(TASKS[name], [file], tokenizer=tokenizer_in(tmp_path), seq_length=8)
    assert dataset.name == "train-1"
    assert dataset.has_labels
    items = [dataset[i] for i in range(len(dataset))]
    assert [(item["uid"].item(), item["label"].item()) for item in items] == EXPECTED[name]
    is_pair = name not in ("SST-2", "CoLA")
    assert items[0]["text"].tolist() == [2, 4, 5, 3, *([6, 3, 0, 0] if is_pair else [0] * 4)]
    kind = np.float64 if name == "STS-B" else np.int64
    assert (dataset.labels.dtype, dataset.num_classes) == (kind, len(TASKS[name].classes) or 1)


@pytest.mark.parametrize("name", TEST)
def test_a_test_file_has_no_labels(tmp_path, name):
    read = TASKS[name].read(write(tmp_path / "test.tsv", TEST[name]))
    assert not read.has_labels
    second = None if name in ("SST-2", "CoLA") else "b"
    assert [(e.firsts, e.second, e.label, e.uid) for e in read.examples] == [(("a",), second, 0, 8)]


def test_scores_are_compared_in_full_precision(tmp_path):
    file = write(
        tmp_path / "dev.tsv", [TRAINING["STS-B"][0], row(10, c0="7", c7="a", c8="b", c9="3.8")]
    )
    dataset = TaskDataset(TASKS["STS-B"], [file], tokenizer=tokenizer_in(tmp_path), seq_length=8)
    assert dataset.labels.tolist() == [3.8]


def test_a_test_file_is_not_trained_on(tmp_path):
    train = write(tmp_path / "train.tsv", TRAINING["MNLI"])
    test = write(tmp_path / "test.tsv", TEST["MNLI"])
    read = partial(TASKS["MNLI"].data, tokenizer=tokenizer_in(tmp_path), seq_length=8)
    assert len(read([train, test], trains=False)) == len(read([train], trains=True)) + 1
    with problem(f"--train-data {test} … no labels", WrongDataError):
        read([train, test], trains=True)


@pytest.mark.parametrize(
    ("name", "line", "words"),
    [
        ("MNLI", row(12, c0="7", c8="a", c9="", c11="neutral"), "column 10 is empty"),
        ("MNLI", row(12, c0="7", c8="a", c9="b"), "label '-' … contradiction, ent"),
        ("MNLI", row(12, c0="7", c8="a", c9="b", c11=""), "label ''"),
        ("MNLI", row(11, c0="7", c8="a", c9="b"), "11 columns … 12"),
        ("MNLI", row(12, c0="x7", c8="a", c9="b", c11="neutral"), "id 'x7' … integer"),
        ("QNLI", "8\ta\tb", "3 columns … 4"),
        ("RTE", "8\ta\tb\tneutral", "label 'neutral'"),
        ("SST-2", "a\t2", "label '2'"),
        ("CoLA", "gj04\t1\t\t ", "column 4 is empty"),
        ("STS-B", row(10, c0="8", c9="nan"), "score 'nan' … finite"),
        ("STS-B", row(10, c0="8", c9="five"), "score 'five'"),
        ("MRPC", "1\t2\t3\ta", "4 columns … 5"),
        ("QQP", row(6, c0="8", c5="yes"), "label 'yes'"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, name, line, words):
    file = write(tmp_path / "train.tsv", [*TRAINING[name], line])
    with problem(words, WrongDataError) as error:
        TASKS[name].read(file)
    assert str(error.value).startswith(f"{file}, line {len(TRAINING[name]) + 1}: ")


@pytest.mark.parametrize("name", sorted(set(TRAINING) - {"CoLA"}))
def test_a_file_without_header_is_refused(tmp_path, name):
    file = write(tmp_path / "train.tsv", TRAINING[name][1:])
    with problem("line 1 … names", WrongDataError):
        TASKS[name].read(file)


def test_bad_lines_of_qqp_are_skipped_and_counted(tmp_path, caplog):
    bad = [row(5, c0="8"), row(6, c0="9", c3="", c5="0")]
    file = write(tmp_path / "train.tsv", [*TRAINING["QQP"], *bad, TRAINING["QQP"][1]])
    assert len(TASKS["QQP"].read(file).examples) == 2
    assert f"2 lines skipped, the first of them: {file}, line 3: 5 columns" in caplog.text
    write(file, [*TRAINING["QQP"], *bad])
    with problem("2 of 3 lines … 50%", WrongDataError):
        TASKS["QQP"].read(file)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file … did you mean"),
        (b"", "empty … QNLI"),
        (b"a\tb\n", "line 1 … 2 columns … 4"),
        (b"index\tq\ts\tlabel\n", "no example … QNLI"),
        (b"index\tq\ts\tlabel\n1\t\xff\tb\tentailment\n", "line 2 … byte 18 … UTF-8"),
    ],
)
def test_an_unusable_file_is_named(tmp_path, content, words):
    file = write(tmp_path / "train.tsv", [])
    if content is None:
        file = tmp_path / "trains.tsv"
    else:
        file.write_bytes(content)
    tokenizer = tokenizer_in(tmp_path)
    with problem(words, WrongDataError) as error:
        TaskDataset(TASKS["QNLI"], [file], tokenizer=tokenizer, seq_length=8)
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    ("task", "path", "name"),
    [
        ("MNLI", "/data/MNLI/dev_matched.tsv", "dev-matched"),
        ("MNLI", "glue/MNLI/original/dev_mismatched.tsv", "original-dev-mismatched"),
        ("QQP", "QQP/test.tsv", "test"),
        ("SST-2", "SST-2/SST-2/test.tsv", "test"),
        ("RACE", "/RACE/RACE/dev/middle/", "dev-middle"),
        ("RACE", "/data/dev/high", "high"),
        ("MNLI", "my_examples.tsv", "my-examples"),
        ("MNLI", "dev_MNLI.tsv", "dev-MNLI"),
    ],
)
def test_a_set_is_named_by_its_path(task, path, name):
    assert TASKS[task].set_name(Path(path)) == name


def passage(**changed):
    return {
        "article": "a b . c",
        "questions": ["d _ e _?", "f"],
        "options": [[*"abcd"], [*"efgh"]],
        "answers": ["B", "D"],
    } | changed


def test_race_counts_questions(tmp_path):
    folder = tmp_path / "RACE/dev/high"
    write(folder / "2.txt", [json.dumps(passage(answers=["A", "C"]))])
    write(folder / "10.txt", [json.dumps(passage()), json.dumps(passage())])
    write(folder / "below/0.txt", ["no JSON"])
    tokenizer = tokenizer_in(tmp_path)
    dataset = TaskDataset(TASKS["RACE"], [folder] * 2, tokenizer=tokenizer, seq_length=12)
    assert dataset.name == "dev-high+dev-high"
    assert dataset.labels.tolist() == [1, 3, 1, 3, 0, 2] * 2
    assert [dataset[i]["uid"].item() for i in (0, 5, 6, 11)] == [0, 5, 0, 5]
    first, second = dataset[0], dataset[1]
    assert [WORDS[i] for i in first["text"][1]] == [
        "[CLS]",
        "d",
        "b",
        "e",
        "b",
        "?",
        "[SEP]",
        "a",
        "b",
        ".",
        "c",
        "[SEP]",
    ]
    assert [WORDS[i] for i in second["text"][3]] == (
        ["[CLS]", "f", "h", "[SEP]", "a", "b", ".", "c", "[SEP]", "[PAD]", "[PAD]", "[PAD]"]
    )
    assert first["types"][1].tolist() == [0] * 7 + [1] * 5
    assert {key: array.shape for key, array in first.items()} == {
        **dict.fromkeys(("text", "types", "padding_mask"), (4, 12)),
        **dict.fromkeys(("label", "uid"), ()),
    }


def test_a_question_of_race_is_cut_before_it_is_packed(tmp_path):
    long = passage(questions=["d " * 200, "f"])
    write(tmp_path / "1.txt", [json.dumps(long)])
    tokenizer = tokenizer_in(tmp_path)
    (text, *_) = TaskDataset(TASKS["RACE"], [tmp_path], tokenizer=tokenizer, seq_length=140)[0][
        "text"
    ]
    assert text[:131].tolist() == [2, *[7] * 128, 3, 4]


def test_hidden_files_of_race_are_passed_over(tmp_path):
    write(tmp_path / "1.txt", [json.dumps(passage())])
    (tmp_path / "._1.txt").write_bytes(b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X\xff")
    assert len(TASKS["RACE"].read(tmp_path).examples) == 2
    write(tmp_path / "1.txt", [json.dumps(passage(questions=[], options=[], answers=[]))])
    with problem("1 *.txt … no question", WrongDataError):
        TASKS["RACE"].read(tmp_path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "JSON … '{' … on one line"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "not a JSON object"),
        (json.dumps(passage(article=" \n")), "article … empty"),
        (json.dumps(passage(article=3)), "'article' … missing … text"),
        (json.dumps({"article": "a"}), "'questions' … missing … list"),
        (json.dumps(passage(answers=["A"])), "2 questions, 2 … 1 answers"),
        (json.dumps(passage(answers=["A", "E"])), "answer 2 … 'E' … A, B, C, D"),
        (json.dumps(passage(answers=["A", None])), "answer 2 … None"),
        (json.dumps(passage(options=[[*"abc"], [*"efgh"]])), "question 1 … list of 4"),
        (json.dumps(passage(options=[[*"abc", 1], [*"efgh"]])), "question 1 … strings"),
    ],
)
def test_a_malformed_passage_is_named(tmp_path, line, words):
    file = write(tmp_path / "1.txt", [json.dumps(passage()), line])
    with problem(words, WrongDataError) as error:
        TASKS["RACE"].read(tmp_path)
    assert str(error.value).startswith(f"{file}, line 2: ")


@pytest.mark.parametrize(
    ("path", "words"),
    [("RACE", "RACE … high, middle"), ("RACE/midle", "did you mean … middle")],
)
def test_a_folder_without_passages_is_named(tmp_path, path, words):
    for name in ("high", "middle"):
        write(tmp_path / "RACE" / name / "1.txt", [json.dumps(passage())])
    with problem(words, WrongDataError):
        TASKS["RACE"].read(tmp_path / path)


def test_texts_that_are_cut_are_counted(tmp_path, caplog):
    lines = ["sentence\tlabel", "a b c\t0", "a\t1", "a b c d\t1"]
    file = write(tmp_path / "SST-2/train.tsv", lines)
    tokenizer = tokenizer_in(tmp_path)
    with caplog.at_level("WARNING"):
        TaskDataset(TASKS["SST-2"], [file], tokenizer=tokenizer, seq_length=6)
        assert not caplog.records
        TaskDataset(TASKS["SST-2"], [file], tokenizer=tokenizer, seq_length=5)
    assert "train: 1 of 3 examples of SST-2 lose the ends" in caplog.text
