"""Rows of Parquet files come in pieces whose memory has a bound, whatever the file is like."""

import gzip
import json
import random

import pytest
from bytes_tokenizer import BytesTokenizer
from problems import problem, require_problem

from megatron.common.errors import DataError
from megatron.data.preprocessing.preprocess import convert_share, preprocess
from megatron.data.preprocessing.preprocess_spec import PreprocessSpec
from megatron.data.readers.documents import read_documents
from megatron.data.readers.inputs import cut_source, find_sources, read_blocks
from megatron.data.readers.line_blocks import Limits

parquet = pytest.importorskip("pyarrow.parquet")
pyarrow = pytest.importorskip("pyarrow")

LETTERS = random.Random(1).randbytes(1 << 23).hex()


def read(sources, limits, columns=("text",)):
    """Return the blocks, and the most bytes that columns held between any two."""
    pool = pyarrow.default_memory_pool()
    before = pool.bytes_allocated()
    found, held = [], [0]
    for block in read_blocks(sources, limits, columns=columns):
        found.append(block)
        held.append(pool.bytes_allocated() - before)
    return found, max(held)


def texts_of(blocks):
    documents = [read_documents(block, ("text",), 1 << 26) for block in blocks]
    assert not any(each.bad for each in documents)
    return [text for each in documents for text in each.texts[0]]


def write(path, columns, **how):
    parquet.write_table(pyarrow.table(columns), path, **how)
    return find_sources([str(path)])


def test_a_column_that_no_key_names_is_not_read(tmp_path):
    columns = {"text": ["a"] * (1 << 17), "n": pyarrow.array(range(1 << 17))}
    sources = write(tmp_path / "t", columns, use_dictionary=False)
    blocks, peak = read(sources, Limits(1 << 20, 1 << 26), ("text", "other"))
    assert sum(len(block.data) for block in blocks) < 6 << 17  # a letter and where it ends
    documents = read_documents(blocks[0], ("other",), 1 << 26)
    assert documents.bad[0].problem.startswith("no key 'other'; it has 'text', 'n' (")
    both, of_both = read(sources, Limits(1 << 20, 1 << 26), ("text", "n"))
    assert texts_of(blocks) == texts_of(both) == ["a"] * (1 << 17)
    assert peak < of_both


def test_a_row_group_is_not_held(tmp_path):
    texts = [LETTERS[i : i + 5000] for i in range(0, len(LETTERS), 5000)]
    sources = write(tmp_path / "t", {"text": texts}, use_dictionary=False, write_batch_size=10)
    blocks, peak = read(sources, Limits(1 << 17, 1 << 22))
    assert texts_of(blocks) == texts
    assert peak < len(LETTERS) // 2


@pytest.mark.parametrize("kind", ["string", "large_string", "a dictionary"])
def test_rows_that_share_a_text_are_not_read_at_once(tmp_path, kind):
    texts = [LETTERS[:100_000]] * 300 + [LETTERS[7:200_000], "", "a"] * 100
    column = pyarrow.array(texts, "string" if kind == "a dictionary" else kind)
    column = column.dictionary_encode() if kind == "a dictionary" else column
    sources = write(tmp_path / "t", {"text": column})
    assert sources[0].num_bytes < 1 << 20
    blocks, peak = read(sources, Limits(1 << 17, 1 << 22))
    assert texts_of(blocks) == texts
    assert peak < 1 << 24
    assert all(len(block.data) < 1 << 18 for block in blocks)


@pytest.mark.parametrize("block_lines", [None, 7])
@pytest.mark.parametrize("block_bytes", [1, 100, 1 << 12])
def test_blocks_of_all_parts_are_the_rows_cut_anywhere(tmp_path, block_bytes, block_lines):
    texts = [LETTERS[: i * 37 % 90] for i in range(100)]
    sources = write(tmp_path / "t", {"text": texts, "n": range(100)}, row_group_size=23)
    limits = Limits(block_bytes, 1 << 20, block_lines)
    (source,) = sources
    for num_bytes in (source.num_bytes, source.num_bytes // 3):
        starts = range(0, source.num_bytes, num_bytes)
        parts = [part for i in starts for part in cut_source(source, i, i + num_bytes)]
        blocks = [block for part in parts for block in read([part], limits)[0]]
        assert texts_of(blocks) == texts
        assert all(block.end - block.start <= (block_lines or 100) for block in blocks)
        assert [block.start for block in blocks] == [0, *(block.end for block in blocks[:-1])]


def test_a_row_over_the_limit_is_reported(tmp_path):
    texts = ["a", LETTERS[:70_000], "b", "c"]
    write(tmp_path / "t", {"text": texts, "id": range(4)})
    (written,) = preprocess(
        PreprocessSpec(
            inputs=(str(tmp_path / "t"),),
            output_prefix=str(tmp_path / "out"),
            make_encoder=BytesTokenizer,
            max_memory_mb=1,
            on_error="skip",
            bad_lines_path=str(tmp_path / "bad"),
        )
    )
    assert (written.documents, written.bad) == (3, 1)
    report = json.loads((tmp_path / "bad").read_text())
    assert report["row"] == 2
    assert report["excerpt"] == LETTERS[:80]
    require_problem("bytes … 65536 … --max-memory-mb", [report["problem"]])


@pytest.mark.parametrize("splits", [False, True])
def test_a_table_without_a_column_is_reported_once_and_not_row_by_row(tmp_path, splits):
    for name, columns in {"a": {"text": ["a"]}, "b": {"body": ["b"] * 9}, "c": {"n": [1]}}.items():
        write(tmp_path / name, columns)
    conversion = PreprocessSpec(
        inputs=tuple(str(tmp_path / name) for name in "abc"),
        output_prefix=str(tmp_path / "out"),
        make_encoder=BytesTokenizer,
        on_error="skip",
        split_sentences=splits,
    )
    for begin in (preprocess, lambda spec: convert_share(spec, 0, 2)):
        with pytest.raises(DataError) as caught:
            begin(conversion)
        assert str(caught.value).splitlines() == [
            f"{tmp_path / 'b'}: no key 'text'; it has 'body' (--json-keys names the keys)",
            f"{tmp_path / 'c'}: no key 'text'; it has 'n' (--json-keys names the keys)",
        ]


def test_a_table_in_a_pipe_is_named(tmp_path, stdin):
    write(tmp_path / "t", {"text": ["a"]})
    with gzip.open(tmp_path / "t.gz", "wb") as file:
        file.write((tmp_path / "t").read_bytes())
    stdin(tmp_path / "t")
    for name in ("-", str(tmp_path / "t.gz")):
        with problem(f"--input {name} … Parquet … pipe … write it to a file", DataError):
            list(read_blocks(find_sources([name]), Limits(1 << 20, 1 << 26)))
