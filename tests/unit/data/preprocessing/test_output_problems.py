"""Outputs that preprocessing would overwrite or could not write are named before it begins."""

import json

import pytest
from problems import problem

from megatron.common.errors import ConfigError
from megatron.data.preprocessing.command import read_flags


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """Work in a directory with a corpus."""
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"text": "1 2", "a": "3"}) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems(line, *more):
    """Return what is wrong with flags."""
    flags = f"--input corpus.jsonl --tokenizer-type NullTokenizer --vocab-size 10 {line}"
    try:
        read_flags([*flags.split(), *more], description="")
    except ConfigError as error:
        return error.problems
    return ()


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("out_text_document.bin", ""),
        ("./out_text_document.idx", ""),
        ("../{here}/out_text_document.tokenizer.json", ""),
        ("out_a_sentence.bin", "--json-keys text a --split-sentences"),
        ("out_loss_mask_document.idx", "--conversations"),
        ("out.report.json", ""),
        ("out.stage", ""),
        ("out.stage/bad", ""),
    ],
)
def test_the_list_of_bad_lines_is_no_output_of_the_same_run(directory, path, more):
    path = path.format(here=directory.name)
    (directory / "out.stage").mkdir(exist_ok="/" in path)
    if path == "out.stage":
        (directory / "out.stage").rmdir()
    found = problems(f"--output-prefix out --on-error collect {path} {more}")
    assert f"--on-error collect {path} is one of the files that this run writes" in found[0]


def test_the_list_of_bad_lines_may_be_any_other_file(directory):
    (directory / "bad").write_text('{"problem": "", "excerpt": ""}\n')
    for path in ("bad", "new", "out_a_document.bin", "out.stage.bad"):
        assert problems(f"--output-prefix out --on-error collect {path}") == ()
    (directory / "folder").mkdir()
    (found,) = problems("--output-prefix out --on-error collect folder")
    assert "--on-error collect folder is a directory" in found


@pytest.mark.parametrize(
    ("file", "more"),
    [
        ("out_text_document.bin", ""),
        ("out_text_document.idx", "--workers 2"),
        ("out_text_document.tokenizer.json", ""),
        ("out_a_sentence.bin", "--json-keys a --split-sentences"),
        ("out_tokens_document.bin", "--conversations"),
        ("out.report.json", ""),
    ],
)
def test_no_output_replaces_an_input(directory, file, more):
    (directory / "corpus.jsonl").rename(directory / file)
    (directory / "corpus.jsonl").symlink_to(file)
    for name in ("corpus.jsonl", f"../{directory.name}/{file}", f"{file[:-1]}[{file[-1]}]"):
        found = problems(f"--output-prefix out --input {name} {more}")
        assert "would be replaced: this run writes out" in found[0]
        assert found[0].startswith("--input ")
    assert problems("--output-prefix other") == ()


def test_no_output_replaces_a_file_of_the_tokenizer(directory):
    (directory / "out.report.json").write_text("{}")
    (found,) = problems("--output-prefix out --chat-template out.report.json --conversations")
    assert found.startswith("--chat-template out.report.json would be replaced: this run writes")
    flags = ["--input", "corpus.jsonl", "--output-prefix", "out", "--vocab-file", "out.report.json"]
    more = ["--tokenizer-type", "GPT2BPETokenizer", "--merge-file", "none"]
    with problem("--vocab-file out.report.json … --output-prefix"):
        read_flags([*flags, *more], description="")


def test_no_input_lies_in_the_folder_that_is_emptied(directory):
    (directory / "out.stage").mkdir()
    (directory / "corpus.jsonl").rename(directory / "out.stage" / "a.jsonl")
    (found,) = problems("--output-prefix out --input out.stage/*.jsonl")
    assert "--input out.stage/a.jsonl lies in out.stage, which this run empties" in found


def test_a_key_is_part_of_a_file_name():
    slash, zero = problems("--output-prefix out --json-keys text a/b", "a\0b", "a.b", "é")[:2]
    assert "--json-keys 'a/b'" in slash
    assert "--json-keys 'a\\x00b'" in zero
    assert problems("--output-prefix out --json-keys text a", "a.b", "é", "a b") == ()


@pytest.mark.parametrize("prefix", ["folder/", "folder/..", ".", "./"])
def test_a_prefix_has_a_name_for_the_files(directory, prefix):
    (directory / "folder").mkdir()
    (found,) = problems(f"--output-prefix {prefix}")
    assert f"--output-prefix {prefix} names no files, only a folder" in found
    proposed = found.split()[-1]
    assert proposed.endswith("/corpus")
    assert problems(f"--output-prefix {proposed}") == ()


def test_a_folder_that_is_missing_is_named(directory):
    (found,) = problems("--output-prefix a/b/out")
    assert found.startswith("--output-prefix a/b/out: ")
    assert found.endswith("mkdir -p a/b")
    (directory / "a" / "b").mkdir(parents=True)
    assert problems("--output-prefix a/b/out") == ()
    (found,) = problems("--output-prefix corpus.jsonl/out")
    assert "corpus.jsonl is a file" in found
