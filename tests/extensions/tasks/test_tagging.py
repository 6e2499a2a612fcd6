"""Token classification: files of words and labels, label ids, features, and malformed files."""

import pytest
from problems import problem

from megatron.common.errors import WrongDataError
from megatron.extensions.tasks.data.tagging import (
    TaggingDataset,
    label_names,
    read_sentences,
)
from megatron.tokenizer.build import build_tokenizer

TOKENS = "[PAD] [UNK] [CLS] [SEP] [MASK] anna went to par ##is ##ian in may ."


@pytest.fixture
def tokenizer(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(TOKENS.split()) + "\n")
    return build_tokenizer(
        tokenizer_type="BertWordPieceLowerCase", vocab_file=str(tmp_path / "vocab.txt")
    )


@pytest.fixture
def files(tmp_path):
    (tmp_path / "text_train.txt").write_text("Anna went to Parisian .\n\u200d in May\n")
    (tmp_path / "labels_train.txt").write_text("B-PER O O B-LOC O\nO O B-DATE\n")
    return tmp_path


def dataset(files, tokenizer, labels=None, length=10, **options):
    sentences = read_sentences(files / "text_train.txt")
    labels = labels or label_names(sentences)
    return TaggingDataset(
        sentences, "train", labels=labels, tokenizer=tokenizer, seq_length=length, **options
    )


def row(sample, name):
    return sample[name].tolist()


def test_features_of_words_and_their_pieces(files, tokenizer):
    data = dataset(files, tokenizer)
    assert label_names(data.sentences) == ["O", "B-DATE", "B-LOC", "B-PER"]
    assert row(data[0], "text") == [2, 5, 6, 7, 8, 9, 10, 13, 3, 0]
    assert row(data[0], "labels") == [0, 3, 0, 0, 2, 2, 2, 0, 0, 0]
    assert row(data[0], "first") == [0, 1, 1, 1, 1, 0, 0, 1, 0, 0]
    assert row(data[0], "loss_mask") == [1, 1, 1, 1, 1, 1, 1, 1, 1, 0]
    assert row(data[0], "padding_mask") == [1] * 9 + [0]
    assert set(row(data[0], "types")) == {0}
    # A word that has no piece is [UNK].
    assert row(data[1], "text")[:5] == [2, 1, 11, 12, 3]


def test_special_tokens_and_words_cut_off_are_outside_in_any_order_of_labels(
    files, tokenizer, caplog
):
    data = dataset(files, tokenizer, labels=["B-DATE", "B-LOC", "B-PER", "O"], length=6)
    assert row(data[0], "labels") == [3, 2, 3, 3, 1, 3]
    assert data.word_labels(0, [0, 0, 1, 2, 3, 0]).tolist() == [0, 1, 2, 3, 3]
    assert "predicted as O" in caplog.text


def test_ignored_tokens_do_not_count(files, tokenizer):
    data = dataset(files, tokenizer, ignore_extra_tokens=True, ignore_start_end=True)
    assert row(data[0], "loss_mask") == [0, 1, 1, 1, 1, 0, 0, 1, 0, 0]


def test_balanced_labels_weigh_the_mean_number_of_words(files, tokenizer):
    data = dataset(files, tokenizer, balances=True, ignore_start_end=True)
    # 5 words of 8 are O, and one each of three other labels: the mean is 2.
    assert row(data[1], "loss_mask")[1:4] == pytest.approx([0.4, 0.4, 2.0])


def test_predictions_of_words_are_those_of_their_first_pieces(files, tokenizer):
    data = dataset(files, tokenizer, length=6)
    assert data.word_labels(0, [9, 1, 2, 3, 4, 9]).tolist() == [1, 2, 3, 4, 0]


def test_a_long_sentence_loses_its_end_with_a_warning(files, tokenizer, caplog):
    data = dataset(files, tokenizer, length=6)
    assert row(data[0], "text") == [2, 5, 6, 7, 8, 3]
    assert row(data[0], "labels") == [0, 3, 0, 0, 2, 0]
    assert [data.num_words(i) for i in range(2)] == [4, 3]
    assert "1 of 2 sentences have more than 6 tokens" in caplog.text


def test_columns_are_the_same_sentences(files):
    (files / "train.conll").write_text(
        "-DOCSTART- -X- O O\n\nAnna NNP B-PER\nwent VBD O\nto TO O\nParisian NNP B-LOC\n. . O\n\n\n"
        "\u200d X O\nin IN O\nMay NNP B-DATE\n"
    )
    pairs, columns = (read_sentences(files / name) for name in ("text_train.txt", "train.conll"))
    assert [s.words for s in columns] == [s.words for s in pairs]
    assert [s.labels for s in columns] == [s.labels for s in pairs]
    assert [s.line for s in columns] == [3, 10]


def test_files_without_labels(files):
    (files / "text_new.txt").write_text("Anna went\n")
    (files / "new.txt").write_text("Anna\nwent\n")
    for name in ("text_new.txt", "new.txt"):
        (sentence,) = read_sentences(files / name, labelled=False)
        assert (sentence.words, sentence.labels) == (("Anna", "went"), ())


@pytest.mark.parametrize(
    ("name", "texts", "message"),
    [
        ("text_a.txt", {"text_a.txt": "a b\n"}, "labels_a.txt"),
        (
            "text_a.txt",
            {"text_a.txt": "a b\nc\n", "labels_a.txt": "O O\n"},
            "2 sentences",
        ),
        (
            "text_a.txt",
            {"text_a.txt": "a\nb c\n", "labels_a.txt": "O\nO\n"},
            "text_a.txt, line 2 … 2 words",
        ),
        ("a.conll", {"a.conll": "a O\n\nb\n"}, "a.conll, line 3 … 'b' … label"),
        ("a.conll", {"a.conll": "\n"}, "a.conll … no sentence"),
        ("none.conll", {}, "none.conll … No such file"),
    ],
)
def test_malformed_files_are_named(tmp_path, name, texts, message):
    for file, text in texts.items():
        (tmp_path / file).write_text(text)
    with problem(message, WrongDataError):
        read_sentences(tmp_path / name)


def test_an_unknown_label_is_named_by_file_and_line(files, tokenizer):
    with problem(f"{files / 'labels_train.txt'}, line 2 … 'B-DATE'", WrongDataError):
        dataset(files, tokenizer, labels=["O", "B-PER", "B-LOC"])
