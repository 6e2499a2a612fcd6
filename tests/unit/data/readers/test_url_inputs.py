"""Inputs and outputs at URLs: the files equal those made of local inputs, also over cut connections."""

import gzip
import json

import pytest
from bytes_tokenizer import BytesTokenizer
from object_store import BUCKET
from problems import problem

from megatron.common.cli import run_tool
from megatron.common.errors import ConfigError, DataError
from megatron.common.remote_files import find_files, upload
from megatron.data.preprocessing.command import read_flags
from megatron.data.preprocessing.preprocess import preprocess
from megatron.data.preprocessing.preprocess_spec import PreprocessSpec
from megatron.data.readers.inputs import find_sources
from megatron.data.token_files.indexed_dataset import IndexedDataset
from megatron.data.token_files.remote_pairs import local_pair

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

TEXTS = [f"line {i} {'abc' * (i * 7 % 2000)}" for i in range(1000)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


@pytest.fixture
def inputs(store, tmp_path):
    """Return a folder with an input of each kind, and the URL of its copy."""
    folder = tmp_path / "inputs"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(LINES)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    parquet.write_table(pyarrow.table({"text": TEXTS}), folder / "c.parquet", row_group_size=90)
    url = f"{BUCKET}/{tmp_path.name}"
    for file in folder.iterdir():
        upload(file, f"{url}/{file.name}")
    return folder, url


def convert(*files, prefix, **how):
    preprocess(
        PreprocessSpec(inputs=files, output_prefix=str(prefix), make_encoder=BytesTokenizer, **how)
    )
    return [
        prefix.with_name(f"{prefix.name}_text_document{end}").read_bytes()
        for end in (".bin", ".idx")
    ]


@pytest.mark.parametrize("how", [{"chunk_size": 500}, {"workers": 2, "shard_bytes": 900_000}])
def test_inputs_at_urls_give_the_same_files_over_cut_connections(inputs, store, tmp_path, how):
    folder, url = inputs
    local = convert(*map(str, sorted(folder.iterdir())), prefix=tmp_path / "local", **how)
    store.proxy.cut_next(3, after=1 << 18)
    assert convert(f"{url}/*", prefix=tmp_path / "remote", **how) == local
    assert store.proxy.cut == 3


def test_missing_inputs_are_named_without_what_is_secret(inputs):
    _, url = inputs
    with problem(f"--input {url}/none: No such file", DataError):
        find_sources([f"{url}/none"])
    with problem(f"no file … --input {url}/none*", DataError):
        find_sources([f"{url}/none*"])


def test_a_message_of_a_tool_has_no_secrets(capsys, command_line):
    def fail(argv):
        raise ConfigError(f"{argv[0]} cannot be read")

    command_line("tool", "https://me:word@host/file?signature=abc")
    with pytest.raises(SystemExit):
        run_tool(fail)
    assert capsys.readouterr().err == "error: https://host/file cannot be read\n"


def test_an_output_prefix_at_a_url_holds_the_files_and_nothing_stays_here(
    inputs, store, tmp_path, capsys
):
    folder, url = inputs
    words = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "99", "--json-keys", "text"]
    (folder / "numbers.jsonl").write_text('{"text": "1 2 3"}\n{"text": "4"}\n')
    words += ["--input", str(folder / "numbers.jsonl"), "--object-storage-cache-path"]
    words += [str(tmp_path / "cache"), "--output-prefix", f"{url}/out/corpus"]
    for _ in range(2):  # once more, over the older files
        command = read_flags(words, description="")
        command.deliver(preprocess(command.spec))
    assert f"{url}/out/corpus_text_document.bin" in capsys.readouterr().out
    ends = ("_text_document.bin", "_text_document.bin.xxh3", "_text_document.idx")
    ends += ("_text_document.tokenizer.json", ".report.json")
    assert sorted(find_files(f"{url}/out")) == sorted(f"corpus{end}" for end in ends)
    assert not [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    dataset = IndexedDataset(local_pair(f"{url}/out/corpus_text_document", tmp_path / "cache"))
    assert [dataset[i].tolist() for i in range(len(dataset))] == [[1, 2, 3], [4]]
