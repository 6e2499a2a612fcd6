"""Sentences: one sequence each, in one pass, with or without NLTK's data."""

import json
import logging
import pickle

import numpy as np
import pytest
from bytes_tokenizer import BytesTokenizer
from problems import problem

from megatron.common.errors import DataError
from megatron.data.preprocessing.preprocess import preprocess
from megatron.data.preprocessing.preprocess_spec import PreprocessSpec
from megatron.data.preprocessing.sentences import SentenceSplitter, build_splitter
from megatron.data.token_files.indexed_dataset import open_token_files

punkt = pytest.importorskip("nltk.tokenize.punkt")

TEXTS = ["One is here. Two is there.\n\nThree is nowhere.", "", "Alone", "A cat sat. It slept."]
SPLIT = [
    ["One is here.", "Two is there.", "Three is nowhere."],
    ["Alone"],
    ["A cat sat.", "It slept."],
]


def write(tmp_path, texts=TEXTS):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts * 1))
    return str(path)


def run(tmp_path, **spec):
    spec = {"output_prefix": str(tmp_path / "out"), "make_encoder": BytesTokenizer} | spec
    (written,) = preprocess(PreprocessSpec(inputs=(write(tmp_path),), split_sentences=True, **spec))
    return written


def read(prefix):
    dataset = open_token_files(prefix)
    dataset.verify()
    starts = dataset.document_starts
    return [
        [bytes(t for t in dataset[i].tolist() if t < 256).decode() for i in range(a, b)]
        for a, b in zip(starts[:-1], starts[1:], strict=True)
    ]


@pytest.mark.parametrize(
    ("dataset_impl", "how"),
    [("lazy", {}), ("cached", {}), ("mmap", {}), ("mmap", {"workers": 2})],
)
def test_each_sentence_is_a_sequence_of_its_document(tmp_path, caplog, dataset_impl, how):
    with caplog.at_level(logging.INFO, "megatron"):
        written = run(tmp_path, dataset_impl=dataset_impl, append_eod=True, **how)
    assert written.prefix.endswith("out_text_sentence")
    assert read(written.prefix) == SPLIT
    dataset = open_token_files(written.prefix)
    last = dataset.document_starts[1:] - 1
    is_ended = [256 in dataset[i].tolist() for i in range(len(dataset))]
    assert np.flatnonzero(is_ended).tolist() == last.tolist()
    report = json.loads((tmp_path / "out.report.json").read_text())["keys"]["text"]
    assert (report["documents"], report["sequences"]) == (3, 6)
    assert "a model trained on the first" in caplog.text  # no data are installed where tests run


def test_special_tokens_around_each_sentence_are_warned_of(tmp_path, caplog):
    class Adding(BytesTokenizer):
        def encode(self, text):
            return [256, *super().encode(text)]

        def gives_back(self, ids, text):
            return True

    with caplog.at_level(logging.WARNING, "megatron"):
        run(tmp_path)
        assert not caplog.records
        run(tmp_path, make_encoder=Adding)
    assert "adds 1 special tokens to each sentence" in caplog.text


def test_empty_documents_can_be_kept(tmp_path):
    written = run(tmp_path, empty_documents="keep", append_eod=True)
    assert read(written.prefix) == [SPLIT[0], [""], *SPLIT[1:]]
    assert written.documents == 4


def test_white_space_stays_with_the_flag(tmp_path):
    written = run(tmp_path, keep_newlines=True)
    assert ["".join(document) for document in read(written.prefix)] == [t for t in TEXTS if t]
    assert read(written.prefix)[0][1] == "Two is there.\n\n"


@pytest.mark.parametrize("keep_newlines", [False, True])
def test_white_space_between_sentences_is_not_missed_when_decoded_again(
    tmp_path, sample_one_in, keep_newlines
):
    sample_one_in(1)
    run(tmp_path, keep_newlines=keep_newlines)
    report = json.loads((tmp_path / "out.report.json").read_text())["keys"]["text"]
    assert (report["decoded_again"], report["changed_by_decoding"]) == (3, 0)


def test_long_texts_are_cut_first():
    splitter = SentenceSplitter("english", True, punkt.PunktParameters(), slice_characters=13)
    text = "One is here. Two is there. Three is nowhere."
    assert "".join(splitter(text)) == text
    assert splitter(text)[0] == "One is here. "


def test_installed_data_are_used_for_the_given_language(nltk_data):
    languages = []
    nltk_data(languages.append)
    assert build_splitter("german", False, iter(())).parameters is None
    assert languages == ["german"]


def test_each_splitter_of_a_process_is_of_its_own_language(nltk_data):
    class Lines:
        """Cuts behind the mark of a language."""

        def __init__(self, lang):
            self._mark = {"english": ".", "german": ";"}[lang]

        def span_tokenize(self, text):
            end = text.index(self._mark) + 1
            yield from ((0, end), (end, len(text)))

    nltk_data(Lines)
    for lang, parts in {"english": ["a;b.", "c"], "german": ["a;", "b.c"]}.items():
        splitter = SentenceSplitter(lang, False)
        assert splitter("a;b.c") == parts
        assert pickle.loads(pickle.dumps(splitter))("a;b.c") == parts  # without its Lines


def test_without_data_and_texts_the_error_names_what_to_install():
    with problem("--lang german … no file", DataError):
        build_splitter("german", False, iter(()))


def test_a_language_that_has_no_data_is_refused(nltk_data):
    with problem("--lang klingon … czech, ", DataError):
        build_splitter("klingon", False, iter(["One. Two."]))
    nltk_data(lambda lang: None)
    assert build_splitter("klingon", False, iter(())).lang == "klingon"
