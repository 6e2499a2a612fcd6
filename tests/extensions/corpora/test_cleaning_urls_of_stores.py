"""Cleaning reads and writes URLs."""

import json

import pytest
from object_store import BUCKET
from problems import problem
from scripts import tool_at

from megatron.common.remote_files import exists, write_text
from megatron.extensions.corpora.cleaning.records import new_files, read_lines
from megatron.extensions.corpora.cleaning.resumable import resumable_output

TEXTS = [f"line {i} {'abc' * (i * 7 % 2000)}" for i in range(1000)]
LINES = [json.dumps({"text": text}) for text in TEXTS]


@pytest.fixture
def url(store, tmp_path):
    folder = f"{BUCKET}/{tmp_path.name}"
    write_text(f"{folder}/a.jsonl", "".join(f"{line}\n" for line in LINES))
    return folder


def tool(name, words):
    tool_at(f"tools/openwebtext/{name}.py").main(words)


def test_cleaning_reads_urls(url):
    assert [line.raw.decode() for line in read_lines([f"{url}/a.jsonl"])] == LINES


def test_cleaning_writes_urls(url):
    output = f"{url}/out/numbered.jsonl"
    with pytest.raises(OSError, match="full"), new_files(output) as (file,):
        file.write(b"{}")
        raise OSError("full")
    assert not exists(output)
    words = ["--input-file", f"{url}/a.jsonl", "--output-file", output, "--id-prefix", "web"]
    tool("add_id", words)
    lines = [json.loads(line.raw) for line in read_lines([output])]
    assert [line["text"] for line in lines] == TEXTS
    with problem("read and replaced"):
        tool("add_id", [*words, "--input-file", output])
    with problem("folder … copy it to the URL"):
        resumable_output(output, {}).__enter__()
    pairs = f"{url}/out/pairs.jsonl"
    tool("find_duplicates", ["--inputs", f"{url}/a.jsonl", "text", "--output", pairs])
    assert exists(pairs)
