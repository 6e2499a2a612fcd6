"""Shards of other options or inputs are not mixed: the error names the differences."""

import json
import os
import random
import shutil
from dataclasses import replace

import pytest
from preprocessing_runs import conversion, killed_before_rename_of
from problems import problem, require_problem

from megatron.common.errors import DataError
from megatron.data.preprocessing.preprocess import convert_share, merge_shards, preprocess


def test_damaged_options_of_finished_shards_are_an_error(directory):
    convert_share(conversion(directory), 0, 2)
    (path,) = (directory / "out.stage").glob("options-*.json")
    path.write_text(path.read_text()[:50])
    with problem("options- … without --resume", DataError):
        convert_share(conversion(directory, append_eod=True), 0, 2)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"append_eod": True}, "document … nothing … 256"),
        ({"tokenizer": {"name": "b"}}, "tokenizer … 'a' … 'b'"),
        ({"json_keys": ("b",)}, "--json-keys … 'a' … 'b'"),
    ],
)
def test_other_options_are_not_mixed_into_a_stage(directory, other, message):
    convert_share(conversion(directory, tokenizer={"name": "a"}), 0, 2)
    with problem(f"another conversion … {message}", DataError):
        convert_share(conversion(directory, **({"tokenizer": {"name": "a"}} | other)), 0, 2)


def test_a_changed_input_is_not_mixed_into_a_stage(directory):
    convert_share(conversion(directory), 0, 2)
    with (directory / "a.jsonl").open("a") as file:
        file.write('{"a": "more"}\n')
    with problem("--input … a.jsonl … bytes", DataError):
        convert_share(conversion(directory), 0, 2)


def test_without_resume_a_stage_is_begun_again(directory):
    convert_share(conversion(directory, tokenizer={"name": "a"}), 0, 1)
    other = conversion(directory, tokenizer={"name": "b"}, resume=False)
    convert_share(other, 0, 1)
    assert len(merge_shards(other)) == 1


def test_missing_shards_are_named(directory):
    with problem("no shards", DataError):
        merge_shards(conversion(directory))
    convert_share(conversion(directory), 0, 2)
    with problem("shards … out.stage … 0000", DataError):
        merge_shards(conversion(directory))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"append_eod": True}, "document … 256 … nothing"),
        ({"json_keys": ("b",)}, "--json-keys … 'b' … 'a'"),
        ({"tokenizer": {"name": "b"}}, "tokenizer … 'b' … not given"),
        ({"max_memory_mb": 9}, "--max-memory-mb … 589824 … 6"),
    ],
)
def test_shards_of_other_options_are_not_merged(directory, other, message):
    convert_share(conversion(directory), 0, 2)
    convert_share(conversion(directory, resume=False, **other), 1, 2)
    with problem(f"another conversion … {message}", DataError):
        merge_shards(conversion(directory))
    convert_share(conversion(directory, resume=False), 1, 2)
    assert len(merge_shards(conversion(directory))) == 1


def test_shards_of_an_input_that_changed_between_them_are_not_merged(directory):
    """A shuffled file has its length still: its lines would be there twice, or not at all."""
    path = directory / "a.jsonl"
    convert_share(conversion(directory, empty_documents="keep"), 0, 2)
    lines = path.read_text().splitlines(keepends=True)
    random.Random(1).shuffle(lines)
    path.write_text("".join(lines))
    convert_share(conversion(directory, append_eod=True, resume=False), 1, 2)
    with pytest.raises(DataError) as caught:
        merge_shards(conversion(directory, append_eod=True))
    for changed in ("--input ", "document … nothing", "--empty-documents … 'keep'"):
        require_problem(changed, [str(caught.value)])


def test_shards_of_the_same_file_on_another_machine_are_merged(directory):
    """A copy that keeps its date is the same input; its inode and its owner do not count."""
    convert_share(conversion(directory), 0, 2)
    path = directory / "a.jsonl"
    shutil.copy2(path, directory / "copy")
    os.replace(directory / "copy", path)
    convert_share(conversion(directory), 1, 2)
    assert merge_shards(conversion(directory))[0].documents == 290


def test_sentences_of_two_models_are_not_mixed(directory, nltk_data):
    """NLTK's data were installed after the first shard, or on one node alone."""
    punkt = pytest.importorskip("nltk.tokenize.punkt")

    class Installed(punkt.PunktSentenceTokenizer):
        def __init__(self, lang):
            super().__init__()
            self._params.abbrev_types.add("dr")

    def missing(lang):
        raise LookupError

    spec = conversion(directory, split_sentences=True)
    nltk_data(missing)
    convert_share(spec, 0, 2)
    convert_share(spec, 1, 2)
    nltk_data(Installed)
    change = "another conversion … sentences … 'trained on the input … 'NLTK data for english"
    with problem(change, DataError):
        convert_share(spec, 1, 2)
    convert_share(replace(spec, resume=False), 1, 2)
    with problem(change, DataError):
        merge_shards(spec)
    nltk_data(missing)
    with problem("another conversion … sentences … 'NLTK data", DataError):
        merge_shards(spec)
    convert_share(replace(spec, resume=False), 1, 2)
    assert merge_shards(spec)[0].documents == 290


def test_a_stage_that_does_not_say_its_model_of_sentences_is_not_resumed(directory):
    """Of an earlier version; without sentences such a stage goes on."""
    pytest.importorskip("nltk.tokenize.punkt")
    for split_sentences in (False, True):
        spec = conversion(directory, split_sentences=split_sentences)
        convert_share(replace(spec, resume=False), 0, 1)
        for path in (directory / "out.stage").glob("options-*.json"):
            options = json.loads(path.read_text())
            del options["the model that splits sentences"]
            path.write_text(json.dumps(options))
        if not split_sentences:
            convert_share(spec, 0, 1)
            continue
        with problem("sentences … not given", DataError):
            convert_share(spec, 0, 1)


def test_work_of_an_earlier_version_is_not_begun_again_in_silence(directory):
    (directory / "out.stage" / "00000-of-00001").mkdir(parents=True)
    (directory / "out.stage" / "00000-of-00001" / "state.json").write_text("{}")
    with problem("earlier version … without --resume", DataError):
        preprocess(conversion(directory))
    assert preprocess(conversion(directory, resume=False))[0].documents == 290


def test_shards_without_their_bad_lines_are_refused_on_stop(directory, monkeypatch):
    with (directory / "a.jsonl").open("a") as file:
        file.write("no JSON\n")
    skip = conversion(directory, on_error="skip")
    stop = conversion(directory)
    message = "--on-error stop … out.stage … 1 bad lines"
    convert_share(skip, 0, 1)
    for again in (merge_shards, preprocess, lambda spec: convert_share(spec, 0, 1)):
        with problem(message, DataError):
            again(stop)
    with killed_before_rename_of(monkeypatch, "document.idx"):
        merge_shards(skip)
    with problem(message, DataError):
        merge_shards(stop)
    assert merge_shards(skip)[0].bad == 1
