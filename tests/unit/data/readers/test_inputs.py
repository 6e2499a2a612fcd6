"""Inputs of every kind give the same lines, whichever way they are cut; damage is named."""

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pytest
from bytes_tokenizer import BytesTokenizer
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from problems import problem

from megatron.common.errors import DataError
from megatron.data.preprocessing.preprocess import convert_share, preprocess
from megatron.data.preprocessing.preprocess_spec import PreprocessSpec
from megatron.data.readers import inputs, line_blocks
from megatron.data.readers.arrow import MAGICS
from megatron.data.readers.decompress import compression_of
from megatron.data.readers.inputs import (
    count_lines,
    cut_source,
    find_sources,
    read_blocks,
    read_range,
)
from megatron.data.readers.line_blocks import Limits, whole_lines
from megatron.data.readers.text_formats import is_array
from megatron.data.token_files.indexed_dataset import IndexedDataset

zstandard = pytest.importorskip("zstandard")
parquet = pytest.importorskip("pyarrow.parquet")
pyarrow = pytest.importorskip("pyarrow")

LINES = [f'{{"text": "line {i} {"x" * (i * 7 % 40)}"}}\n'.encode() for i in range(60)]
TEXTS = [json.loads(line)["text"] for line in LINES]


CONTENT = b"".join(LINES)


def zstd_of_a_long_window(data):
    how = zstandard.ZstdCompressionParameters.from_level(1, window_log=31, enable_ldm=True)
    packer = zstandard.ZstdCompressor(compression_params=how).compressobj()
    return packer.compress(data) + packer.flush()  # its length is not known beforehand


def write_as(path, kind, data=CONTENT):
    table = pyarrow.table({"id": range(len(TEXTS)), "text": TEXTS})
    if kind == "parquet":
        parquet.write_table(table, path, row_group_size=9)
        return str(path)
    if kind in ("arrow stream", "arrow file"):
        new = pyarrow.ipc.new_stream if kind == "arrow stream" else pyarrow.ipc.new_file
        with new(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=9)
        return str(path)
    pack = {
        "plain": bytes,
        "gzip": gzip.compress,
        "gzip of members": lambda data: gzip.compress(data[:500]) + gzip.compress(data[500:]),
        "zstd": zstandard.compress,
        "zstd of frames": lambda data: (
            zstandard.compress(data[:500]) + zstandard.compress(data[500:])
        ),
        "zstd of a long window": zstd_of_a_long_window,
        "zstd after a frame without text": lambda data: (
            b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + zstandard.compress(data)
        ),
        "xz": lzma.compress,
        "lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
        "bzip2": bz2.compress,
    }[kind]
    path.write_bytes(pack(data))
    return str(path)


TABLES = ["parquet", "arrow stream", "arrow file"]
KINDS = [
    "plain",
    "gzip",
    "gzip of members",
    "zstd",
    "zstd of frames",
    "zstd of a long window",
    "zstd after a frame without text",
    "xz",
    "lzma",
    "bzip2",
    *TABLES,
]


def run(tmp_path, *inputs, **spec):
    spec = {"output_prefix": str(tmp_path / "out"), "make_encoder": BytesTokenizer} | spec
    return preprocess(PreprocessSpec(inputs=inputs, **spec))


def read_texts(prefix):
    dataset = IndexedDataset(prefix)
    return [bytes(dataset[i].astype("u1")).decode() for i in range(len(dataset))]


IN_PROCESSES = [
    ("plain", {"workers": 2, "chunk_size": 7}),
    ("parquet", {"workers": 2}),
    ("plain", {"workers": 2, "shard_bytes": 300}),
    ("gzip", {"workers": 2, "shard_bytes": 300}),
]
HERE = [
    (kind, how)
    for kind in KINDS
    for how in ({}, {"chunk_size": 7}, {"shard_bytes": 50}, {"shard_bytes": 50, "chunk_size": 7})
]
UNREADABLE = {
    "ZIP … unpack": b"PK\x03\x04\x14\0\0\0",
    "7-Zip … unpack": b"7z\xbc\xaf\x27\x1c\0\4",
    "LZ4 … unpack": b"\x04\x22\x4d\x18\x64\x40\xa7",
    "UTF-16 … UTF-8": CONTENT.decode().encode("utf-16"),
    "UTF-16 … iconv": CONTENT.decode().encode("utf-16-le"),
    "UTF-16 or UTF-32": CONTENT.decode().encode("utf-16-be"),
}


@pytest.mark.parametrize(("kind", "how"), [*HERE, *IN_PROCESSES])
def test_every_kind_of_file_gives_the_same_documents(tmp_path, kind, how):
    path = write_as(tmp_path / "data", kind)  # the name says nothing about the kind
    (written,) = run(tmp_path, path, **how)
    assert read_texts(written.prefix) == TEXTS


@pytest.mark.parametrize("report", UNREADABLE)
def test_a_file_of_another_format_is_named(tmp_path, report, stdin):
    path = tmp_path / "data"
    path.write_bytes(UNREADABLE[report])
    with problem(f"--input {path} … {report}", DataError):
        run(tmp_path, str(path))
    stdin(path)
    with problem(f"--input - … {report}", DataError):
        run(tmp_path, "-")


def is_text(data):
    try:
        return compression_of(data) is None and not data.startswith((b"PAR1", *MAGICS))
    except DataError:
        return False


def text_of(source, block):
    return read_range(source.path, block.start, block.end) if block.data is None else block.data


@given(
    lines=st.lists(st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"")), max_size=20),
    ends_open=st.booleans(),
    block_bytes=st.integers(1, 50),
    block_lines=st.sampled_from([None, 1, 4]),
    part_bytes=st.integers(1, 300),
    kind=st.sampled_from(["plain", "gzip", "zstd"]),
)
@settings(max_examples=60, deadline=None)
def test_blocks_of_all_parts_are_the_file_cut_between_lines(
    tmp_path_factory, lines, ends_open, block_bytes, block_lines, part_bytes, kind
):
    folder = tmp_path_factory.mktemp("blocks")
    data = b"\n".join(lines) + (b"" if ends_open else b"\n")
    assume(not is_array(data) and (kind != "plain" or is_text(data)))
    path = write_as(folder / "data", kind, data)
    limits = Limits(block_bytes, 1000, block_lines)
    found = []
    (source,) = find_sources([path])
    for start in range(0, max(source.num_bytes, 1), part_bytes):
        for part in cut_source(source, start, start + part_bytes):
            found += [text_of(part, block) for block in read_blocks([part], limits)]
    assert b"".join(found) == data
    assert all(piece.endswith(b"\n") for piece in found[:-1])


@given(
    lines=st.lists(st.integers(0, 20).map(lambda length: b"x" * length), max_size=20),
    ends_open=st.booleans(),
    piece_bytes=st.integers(1, 30),
    line_bytes=st.integers(1, 20),
    block_bytes=st.integers(1, 20),
    block_lines=st.sampled_from([None, 1, 3]),
)
@settings(max_examples=300, deadline=None)
def test_lines_of_a_stream_do_not_depend_on_its_pieces(
    lines, ends_open, piece_bytes, line_bytes, block_bytes, block_lines
):
    assume(block_bytes <= line_bytes)
    data = b"\n".join(lines) + (b"" if ends_open else b"\n")
    pieces = (data[i : i + piece_bytes] for i in range(0, len(data), piece_bytes))
    found = []
    for text, is_too_long, length in whole_lines(
        pieces, Limits(block_bytes, line_bytes, block_lines)
    ):
        if is_too_long:
            found.append((length, "too long"))
            continue
        lines_of_block = text.splitlines(keepends=True)
        found += [(len(line), line) for line in lines_of_block]
        assert length == len(text)
        assert length <= block_bytes or len(lines_of_block) == 1
        assert len(lines_of_block) <= (block_lines or length)
    assert found == [
        (len(line), line if len(line) <= line_bytes else "too long")
        for line in data.splitlines(keepends=True)
    ]


@pytest.mark.parametrize("block_lines", [None, 25])
def test_a_long_line_of_a_stream_is_searched_once(block_lines, monkeypatch):
    searched = []

    def counting(held, limits):
        searched.append(len(held))
        return block_ends(held, limits)

    block_ends = line_blocks._block_ends
    monkeypatch.setattr(line_blocks, "_block_ends", counting)
    pieces = [b"short\n", *[b"x" * 1000] * 200, b"\nshort"]
    found = list(whole_lines(iter(pieces), Limits(1000, 1 << 20, block_lines)))
    assert [text for text, _, _ in found] == [b"short\n", b"x" * 200_000 + b"\n", b"short"]
    assert sum(searched) < 2 * 200_000


@pytest.mark.parametrize("kind", ["plain", "gzip"])
def test_a_line_over_the_limit_is_reported_and_not_held(tmp_path, kind):
    data = b"a\nb\n" + b"long" * 1000 + b"\nc\n" + b"d" * 5000
    (source,) = find_sources([write_as(tmp_path / "data", kind, data)])
    blocks = list(read_blocks([source], Limits(100, 300)))
    kept = b"".join(text_of(source, block) for block in blocks if block.too_long is None)
    long = [block for block in blocks if block.too_long is not None]
    assert kept == b"a\nb\nc\n"
    assert [block.end - block.start for block in long] == [4001, 5000]
    assert long[0].too_long == b"long" * 20


@pytest.mark.parametrize("kind", ["gzip", "zstd", "xz", "bzip2", *TABLES])
def test_a_file_cut_off_is_named(tmp_path, kind):
    path = tmp_path / "data"
    write_as(path, kind, b"".join(LINES) * 50)
    path.write_bytes(path.read_bytes()[:-9])
    with problem("--input … data … not complete", DataError):
        run(tmp_path, str(path))
    assert [p.name for p in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize("kind", ["gzip", "zstd", "xz", "bzip2"])
def test_damage_in_the_middle_is_named(tmp_path, kind):
    path = tmp_path / "data"
    write_as(path, kind, b"".join(LINES) * 50)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 20] = b"\xff" * 20
    path.write_bytes(content)
    with problem("--input … /data", DataError):
        run(tmp_path, str(path))


BAD = b'{"text": "a"}\n' * 4 + b'{"text": 7}\n' + b'{"text": "a"}\n'


@pytest.mark.parametrize(
    ("kind", "how"),
    [*(pair for pair in HERE if pair[0] not in TABLES), ("plain", {"shard_bytes": 30})],
)
def test_a_bad_line_has_its_number_in_every_kind(tmp_path, kind, how):
    path = write_as(tmp_path / "data", kind, BAD)
    with problem("data, line 5 … 'text' … 7", DataError):
        run(tmp_path, path, **how)


def test_a_bad_row_has_its_number(tmp_path):
    table = pyarrow.table({"text": ["a", "b", None], "n": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "t", row_group_size=1)
    with problem("t, row 3 … 'text' … null", DataError):
        run(tmp_path, str(tmp_path / "t"))
    with problem("t: … 'body' … 'text', 'n' … --json-keys", DataError):
        run(tmp_path, str(tmp_path / "t"), json_keys=("body",))


def test_bad_lines_are_collected_and_the_rest_converted(tmp_path):
    first = write_as(tmp_path / "1", "plain", BAD + b"nonsense\n")
    second = write_as(tmp_path / "2", "gzip", BAD)
    found = set()
    for how in ({}, {"shard_bytes": 30}, {"workers": 2, "chunk_size": 1, "shard_bytes": 50}):
        collected = tmp_path / "bad.jsonl"
        (written,) = run(
            tmp_path, first, second, on_error="skip", bad_lines_path=str(collected), **how
        )
        assert (written.documents, written.bad) == (10, 3)
        found.add(collected.read_text())
    (report,) = found
    lines = [json.loads(line) for line in report.splitlines()]
    assert [(line["file"], line["line"]) for line in lines] == [
        (first, 5),
        (first, 7),
        (second, 5),
    ]
    assert lines[1]["excerpt"] == "nonsense"
    assert "not JSON" in lines[1]["problem"]


def test_lines_before_a_part_are_counted_once(tmp_path, monkeypatch):
    path = write_as(tmp_path / "data", "plain", b'{"text": "a"}\n' * 20 + b"bad\n" * 20)
    counted = []

    def counting(*args):
        counted.append(args)
        return count_lines(*args)

    monkeypatch.setattr(inputs, "count_lines", counting)
    spec = PreprocessSpec(
        inputs=(path,),
        output_prefix=str(tmp_path / "out"),
        make_encoder=BytesTokenizer,
        on_error="skip",
        chunk_size=2,
        shard_bytes=280,
    )
    convert_share(spec, 1, 2)
    (report,) = spec.staging.glob("*/bad")
    numbers = [json.loads(line)["line"] for line in report.read_text().splitlines()]
    assert numbers == list(range(21, 41))
    assert len(counted) == 1


def test_globs_are_sorted_and_a_name_that_exists_is_taken_as_it_is(tmp_path):
    for name in ("b.x", "a.x", "[ab].x"):
        (tmp_path / name).write_text("{}\n")
    found = [source.path for source in find_sources([str(tmp_path / "*.x")])]
    assert found == [str(tmp_path / name) for name in ("[ab].x", "a.x", "b.x")]
    assert len(find_sources([str(tmp_path / "[ab].x")])) == 1
    with problem("--input … *.y", DataError):
        find_sources([str(tmp_path / "*.y")])


@pytest.mark.parametrize("kind", ["plain", "gzip", "zstd"])
def test_standard_input_may_be_packed(tmp_path, kind, stdin):
    stdin(Path(write_as(tmp_path / "data", kind)))
    (written,) = run(tmp_path, "-")
    assert read_texts(written.prefix) == TEXTS


def test_standard_input_has_no_parts(tmp_path):
    with problem("--input - … pipe … files", DataError):
        convert_share(
            PreprocessSpec(
                inputs=("-",), output_prefix=str(tmp_path / "out"), make_encoder=BytesTokenizer
            ),
            0,
            2,
        )


@pytest.mark.parametrize(
    ("library", "kind"), [("zstandard", "zstd"), ("pyarrow", "parquet"), ("pyarrow", "arrow file")]
)
def test_a_missing_library_is_named(tmp_path, library, kind, modules):
    path = write_as(tmp_path / "data", kind)
    for name in (library, f"{library}.parquet"):
        modules(name)
    with problem(f"pip install {library}"):
        run(tmp_path, path)
