"""JSON lines to token files: the same bytes for any number of workers, or nothing at all."""

import json
import logging
import struct
from functools import partial
from pathlib import Path
from types import MappingProxyType

from hypothesis import given, settings
from hypothesis import strategies as st
from preprocessed import Bytes, conversion, outputs, read_texts, read_tokens, run, write_lines
from problems import problem

from megatron.common.errors import DataError
from megatron.data.preprocessing.command import lost_texts, summary
from megatron.data.preprocessing.preprocess import (
    convert_share,
    merge_shards,
)
from megatron.data.token_files.indexed_dataset import IndexedDataset


class WithBos(Bytes):
    """Bytes, and a token to begin with."""

    vocab_size = 258
    special_ids = MappingProxyType({"eod": 256, "bos": 257})


class WithoutEod(Bytes):
    """Bytes alone."""

    special_ids = MappingProxyType({})


def test_each_line_becomes_a_document_in_the_order_of_the_input(tmp_path):
    first = write_lines(tmp_path / "1.jsonl", [{"text": "one", "id": 1}, {"text": "two é"}])
    second = write_lines(tmp_path / "2.jsonl", [{"text": "three"}])
    (written,) = run(tmp_path, [second, first])
    assert read_texts(tmp_path / "out_text_document") == ["three", "one", "two é"]
    assert written.prefix == str(tmp_path / "out_text_document")
    assert (written.documents, written.tokens, written.dropped) == (3, 14, 0)
    assert written.bytes == 14 * 2 + 34 + 12 * 3 + 8 * 4


def test_every_document_ends_with_eod_with_the_flag(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "ab"}, {"text": ""}, {"text": "c"}])
    (written,) = run(tmp_path, [path], append_eod=True)
    dataset = IndexedDataset(written.prefix)
    assert [dataset[i].tolist() for i in range(len(dataset))] == [[97, 98, 256], [99, 256]]
    assert written.dropped == 1


def test_a_document_empty_under_one_key_goes_under_all(tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl",
        [{"src": "a", "dst": ""}, {"src": "b", "dst": "c"}, {"src": "", "dst": "d"}],
    )
    src, dst = run(tmp_path, [path], json_keys=("src", "dst"))
    assert read_texts(src.prefix) == ["b"]
    assert read_texts(dst.prefix) == ["c"]
    assert (src.documents, src.dropped, dst.dropped) == (1, 2, 2)


def test_empty_documents_are_kept_under_all_keys_with_the_flag(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"src": "a", "dst": ""}, {"src": "", "dst": "d"}])
    src, dst = run(
        tmp_path, [path], json_keys=("src", "dst"), empty_documents="keep", append_eod=True
    )
    assert read_tokens(src.prefix) == [[97, 256], [256]]
    assert read_tokens(dst.prefix) == [[256], [100, 256]]
    assert src.dropped == 0


def test_a_document_empty_under_one_key_goes_under_that_key_alone_with_the_flag(tmp_path):
    rows = [("a", ""), ("b", "c"), ("", "d"), ("", ""), ("e", "f")]
    path = write_lines(tmp_path / "a.jsonl", [{"src": a, "dst": b} for a, b in rows])
    for cut in ({}, {"shard_bytes": 30}, {"workers": 2, "shard_bytes": 50, "chunk_size": 1}):
        src, dst = run(tmp_path, [path], json_keys=("src", "dst"), empty_documents="per-key", **cut)
        assert read_texts(src.prefix) == ["a", "b", "e"]
        assert read_texts(dst.prefix) == ["c", "d", "f"]
        assert (src.documents, src.dropped, src.empty) == (3, 2, 2)
        assert (dst.documents, dst.dropped, dst.empty) == (3, 2, 2)


def test_the_end_of_a_run_names_texts_that_are_lost_for_another_key(tmp_path):
    rows = [("a", ""), ("b", "c"), ("", ""), ("e", "")]
    path = write_lines(tmp_path / "a.jsonl", [{"src": a, "dst": b} for a, b in rows])
    results = run(tmp_path, [path], json_keys=("src", "dst"))
    (warning,) = lost_texts(results)
    assert "(documents without a token: src: 1, dst: 3); --empty-documents per-key" in warning
    for how in ("per-key", "keep", "megatron-lm"):
        again = run(tmp_path, [path], json_keys=("src", "dst"), empty_documents=how)
        assert [*lost_texts(again)] == []
    assert "left out: 0 | documents without a token, kept: 3" in summary(again[1])


def test_a_key_without_any_token_is_named(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"src": "a", "dst": ""}, {"src": "b", "dst": ""}])
    for how in ("per-key", "megatron-lm"):
        with problem("'dst' … 2 documents", DataError):
            run(tmp_path, [path], json_keys=("src", "dst"), empty_documents=how)
    assert outputs(tmp_path) == []


def megatron_lm_pair(texts, *, append_eod):
    """Return .bin and .idx as Megatron-LM's tool writes them of one key.

    A text without tokens is a document without a sequence: nothing is added to the sizes, and no
    end to the tokens, but the list of where documents start gets its entry.
    """
    tokens, sizes, starts = [], [], [0]
    for text in texts:
        ids = [*text.encode()]
        if ids:
            ids += [256] * append_eod
            tokens += ids
            sizes.append(len(ids))
        starts.append(len(sizes))
    pointers = [2 * sum(sizes[:i]) for i in range(len(sizes))]
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(sizes), len(starts))
    index += struct.pack(f"<{len(sizes)}i{len(sizes)}q", *sizes, *pointers)
    index += struct.pack(f"<{len(starts)}q", *starts)
    return struct.pack(f"<{len(tokens)}H", *tokens), index


@given(
    rows=st.lists(
        st.tuples(st.sampled_from(["", "a", "bc é"]), st.sampled_from(["", "x", "yz"])),
        min_size=1,
        max_size=9,
    ).filter(lambda rows: all(map(any, zip(*rows, strict=True)))),
    append_eod=st.booleans(),
    shard_bytes=st.integers(1, 200),
)
@settings(max_examples=40, deadline=None)
def test_empty_documents_of_megatron_lm_are_byte_for_byte_its_own(
    tmp_path_factory, rows, append_eod, shard_bytes
):
    tmp_path = tmp_path_factory.mktemp("megatron")
    path = write_lines(tmp_path / "a.jsonl", [{"src": a, "dst": b} for a, b in rows])
    results = run(
        tmp_path,
        [path],
        json_keys=("src", "dst"),
        empty_documents="megatron-lm",
        append_eod=append_eod,
        shard_bytes=shard_bytes,
    )
    for written, texts in zip(results, zip(*rows, strict=True), strict=True):
        found = tuple(Path(written.prefix + suffix).read_bytes() for suffix in (".bin", ".idx"))
        assert found == megatron_lm_pair(texts, append_eod=append_eod)
        assert (written.documents, written.dropped) == (len(rows), 0)
        assert written.empty == texts.count("")
        dataset = IndexedDataset(written.prefix)
        dataset.verify()
        assert len(dataset) == len(rows) - written.empty


def test_bos_follows_eod_and_a_space_goes_in_front(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a"}, {"text": ""}])
    spec = {
        "append_eod": True,
        "append_bos": True,
        "prepend_space": True,
        "empty_documents": "keep",
    }
    (written,) = run(tmp_path, [path], make_encoder=WithBos, **spec)
    assert read_tokens(written.prefix) == [[32, 97, 256, 257], [256, 257]]


def test_a_role_that_the_tokenizer_lacks_is_an_error(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    with problem("--append-bos … bos", DataError):
        run(tmp_path, [path], append_bos=True)
    with problem("--append-eod … eod … sentences", DataError):
        run(tmp_path, [path], make_encoder=WithoutEod, append_eod=True)
    assert outputs(tmp_path) == []


def test_blank_lines_byte_order_marks_and_line_ends_are_no_documents(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b\\n"}')
    run(tmp_path, [str(tmp_path / "a.jsonl")])
    assert read_texts(tmp_path / "out_text_document") == ["a", "b\n"]


def test_the_bytes_do_not_depend_on_workers_shards_or_blocks(tmp_path):
    documents = [{"text": "x" * (i * 37 % 101)} for i in range(200)]
    path = write_lines(tmp_path / "a.jsonl", documents)
    found = set()
    for workers, shard_bytes, chunk_size, block_bytes in [
        (1, None, None, 1 << 20),
        (1, None, 7, 50),
        (2, 1000, 1, 1 << 20),
        (2, 99, None, 99),
        (1, 3000, None, 50),
    ]:
        cut = {"workers": workers, "shard_bytes": shard_bytes, "chunk_size": chunk_size}
        cut["block_bytes"] = block_bytes
        (written,) = run(tmp_path, [path], append_eod=True, **cut)
        found.add(
            tuple((tmp_path / f"out_text_document{s}").read_bytes() for s in (".bin", ".idx"))
        )
        assert written.documents == 198
    assert len(found) == 1


@given(
    rows=st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5)), min_size=1, max_size=8),
    num_ranks=st.integers(1, 4),
    shard_bytes=st.integers(1, 200),
    chunk_size=st.sampled_from([None, 1, 3]),
    keep_empty=st.booleans(),
    blanks=st.sampled_from(["", "\n", "  \n\n"]),
)
@settings(max_examples=40, deadline=None)
def test_any_cut_of_the_input_gives_every_document_in_order(
    tmp_path_factory, rows, num_ranks, shard_bytes, chunk_size, keep_empty, blanks
):
    folder = tmp_path_factory.mktemp("cut")
    lines = [json.dumps({"a": a, "b": b}) + "\n" + blanks for a, b in rows]
    (folder / "x.jsonl").write_text("".join(lines))
    spec = conversion(
        folder,
        [str(folder / "x.jsonl")],
        json_keys=("a", "b"),
        empty_documents="keep" if keep_empty else "drop",
        chunk_size=chunk_size,
        shard_bytes=shard_bytes,
        append_eod=True,
    )
    expected = [row for row in rows if keep_empty or all(row)]
    if not expected:
        return
    for rank in range(num_ranks):
        convert_share(spec, rank, num_ranks)
    for k, written in enumerate(merge_shards(spec)):
        assert read_tokens(written.prefix) == [[*row[k].encode(), 256] for row in expected]
        assert written.dropped == len(rows) - len(expected)


def test_large_vocabularies_get_four_bytes(tmp_path):
    class Large(Bytes):
        vocab_size = 70_000

    path = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    run(tmp_path, [path], make_encoder=Large)
    assert IndexedDataset(tmp_path / "out_text_document").dtype == "int32"


def test_progress_is_a_line_each_interval_where_there_is_no_terminal(tmp_path, caplog):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a"}] * 10)
    with caplog.at_level(logging.INFO, "megatron"):
        run(tmp_path, [path], shard_bytes=14, log_interval=4)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(" | documents/s")[0] for line in lines] == [
        "documents: 4 | tokens: 4",
        "documents: 8 | tokens: 8",
    ]
    assert "MB/s: " in lines[0]
    assert "input: 80.0% | left: " in lines[1]


def test_an_encoder_maker_with_arguments_reaches_the_workers(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a"}] * 2)
    run(tmp_path, [path], make_encoder=partial(Shifted, by=1), workers=2, shard_bytes=10)
    assert read_texts(tmp_path / "out_text_document") == ["b", "b"]


class Shifted(Bytes):
    """Bytes, each a little larger."""

    def __init__(self, *, by):
        self.by = by

    def encode(self, text):
        return [token + self.by for token in super().encode(text)]
