"""JSON lines to token files: the same bytes for any number of workers, or nothing at all."""

import gzip
import json
import logging
import os
import signal
import struct
from functools import partial
from pathlib import Path
from types import MappingProxyType

import pytest
from bytes_tokenizer import BytesTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.common.errors import DataError, MegatronError
from megatron.data.preprocessing import preprocess_spec as conversion_module
from megatron.data.preprocessing.command import lost_texts, summary
from megatron.data.preprocessing.preprocess import (
    convert_share,
    input_problems,
    merge_shards,
    preprocess,
)
from megatron.data.preprocessing.preprocess_spec import PreprocessSpec
from megatron.data.token_files.indexed_dataset import IndexedDataset


class Bytes(BytesTokenizer):
    """Bytes, with texts that kill the process or have no tokens."""

    def encode(self, text):
        if text == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "refuse":
            raise DataError("no tokens for this text")
        return super().encode(text)


class WithBos(Bytes):
    """Bytes, and a token to begin with."""

    vocab_size = 258
    special_ids = MappingProxyType({"eod": 256, "bos": 257})


def write_lines(path, documents):
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return str(path)


def conversion(tmp_path, inputs, **wishes):
    wishes = {"make_encoder": Bytes, "output_prefix": str(tmp_path / "out")} | wishes
    return PreprocessSpec(inputs=tuple(inputs), **wishes)


def run(tmp_path, inputs, **wishes):
    return preprocess(conversion(tmp_path, inputs, **wishes))


def read_tokens(prefix):
    dataset = IndexedDataset(prefix)
    return [dataset[i].tolist() for i in range(len(dataset))]


def read_texts(prefix):
    dataset = IndexedDataset(prefix)
    return [bytes(dataset[i].astype("u1")).decode() for i in range(len(dataset))]


def outputs(tmp_path):
    return sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out"))


def test_each_line_becomes_a_document_in_the_order_of_the_input(tmp_path):
    first = write_lines(tmp_path / "1.jsonl", [{"text": "one", "id": 1}, {"text": "two é"}])
    second = write_lines(tmp_path / "2.jsonl", [{"text": "three"}])
    (written,) = run(tmp_path, [second, first])
    assert read_texts(tmp_path / "out_text_document") == ["three", "one", "two é"]
    assert written.prefix == str(tmp_path / "out_text_document")
    assert (written.documents, written.tokens, written.dropped) == (3, 14, 0)
    assert written.bytes == 14 * 2 + 34 + 12 * 3 + 8 * 4


def test_every_document_ends_with_eod_when_asked(tmp_path):
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


def test_empty_documents_are_kept_under_all_keys_when_asked(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"src": "a", "dst": ""}, {"src": "", "dst": "d"}])
    src, dst = run(
        tmp_path, [path], json_keys=("src", "dst"), empty_documents="keep", append_eod=True
    )
    assert read_tokens(src.prefix) == [[97, 256], [256]]
    assert read_tokens(dst.prefix) == [[256], [100, 256]]
    assert src.dropped == 0


def test_a_document_empty_under_one_key_goes_under_that_key_alone_when_asked(tmp_path):
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
        with pytest.raises(DataError, match="for key 'dst': none of the 2 documents in"):
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
    wishes = {
        "append_eod": True,
        "append_bos": True,
        "prepend_space": True,
        "empty_documents": "keep",
    }
    (written,) = run(tmp_path, [path], make_encoder=WithBos, **wishes)
    assert read_tokens(written.prefix) == [[32, 97, 256, 257], [256, 257]]


def test_a_role_that_the_tokenizer_lacks_is_an_error(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    with pytest.raises(DataError, match="--append-bos: the tokenizer has no token of the role bos"):
        run(tmp_path, [path], append_bos=True)
    assert outputs(tmp_path) == []


def test_blank_lines_byte_order_marks_and_line_ends_are_no_documents(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b\\n"}')
    run(tmp_path, [str(tmp_path / "a.jsonl")])
    assert read_texts(tmp_path / "out_text_document") == ["a", "b\n"]


def test_the_bytes_do_not_depend_on_workers_shards_or_blocks(tmp_path, monkeypatch):
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
        monkeypatch.setattr(conversion_module, "_BLOCK_BYTES", block_bytes)
        cut = {"workers": workers, "shard_bytes": shard_bytes, "chunk_size": chunk_size}
        (written,) = run(tmp_path, [path], append_eod=True, **cut)
        found.add(
            tuple((tmp_path / f"out_text_document{s}").read_bytes() for s in (".bin", ".idx"))
        )
        assert written.documents == 198
    assert len(found) == 1


@given(
    rows=st.lists(st.tuples(st.text(max_size=9), st.text(max_size=9)), min_size=1, max_size=20),
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
    wishes = conversion(
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
        convert_share(wishes, rank, num_ranks)
    for k, written in enumerate(merge_shards(wishes)):
        assert read_tokens(written.prefix) == [[*row[k].encode(), 256] for row in expected]
        assert written.dropped == len(rows) - len(expected)


BAD_LINES = [
    (b"plain text", "line 3: not JSON: 'plain text' .*each line must be an object such as"),
    (b'{"text": "a"', "line 3: not JSON: "),
    (b'{"text": "\xff"}', r"line 3: not JSON: .*\(byte 11 is not UTF-8\)"),
    (
        b'  {"text": "\xc3\xa9" "c": 1}',
        r"""line 3: not JSON: .*\(column 16, '"c": 1}': Expecting ',' delimiter\)""",
    ),
    (b'{"text":', r"line 3: not JSON: .*\(column 9, the end: Expecting value\)"),
    (b'{"text": "a\tb"}', r"line 3: .*\(column 12, '\\tb\"}': Invalid control character\)"),
    (b"[" * 200_000, r"line 3: nested too deeply to be read, over about 1000 levels: '\[\[\[\["),
    (b'{"text": ' + b"9" * 5000 + b"}", "line 3: key 'text' holds Infinity, which is not a text"),
    (b'"text"', "line 3: not a JSON object: '\"text\"'"),
    (b'{"body": "a", "id": 1}', "line 3: no key 'text'; it has 'body', 'id' .--json-keys"),
    (b"{}", "line 3: no key 'text'; it has none"),
    (b'{"text": null}', "line 3: key 'text' holds null, which is not a text"),
    (b'{"text": ["a"]}', "line 3: key 'text' holds ..a.., which is not a text"),
    (b'{"text": "refuse"}', "line 3: no tokens for this text"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_line_is_named_and_nothing_is_written(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=f"a.jsonl, {message}"):
        run(tmp_path, [str(path)], chunk_size=1)
    assert outputs(tmp_path) == []


def test_a_bad_line_is_named_by_a_worker_too(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' * 50 + b"x\n" + b'{"text": "a"}\n' * 50)
    with pytest.raises(DataError, match="a.jsonl, line 51: not JSON: 'x'"):
        run(tmp_path, [str(path)], workers=2, shard_bytes=500)
    assert outputs(tmp_path) == ["out.stage"]  # the first shard is finished


def test_a_killed_worker_is_an_error_and_nothing_is_written(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a"}] * 9 + [{"text": "kill"}])
    with pytest.raises(MegatronError, match="a worker process was killed.*--workers than 2"):
        run(tmp_path, [path], workers=2, shard_bytes=120)
    assert outputs(tmp_path) in ([], ["out.stage"])


def test_the_old_files_stay_when_the_new_ones_fail(tmp_path):
    good = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    bad = write_lines(tmp_path / "b.jsonl", [{"text": "b"}, {"text": None}])
    run(tmp_path, [good])
    with pytest.raises(DataError):
        run(tmp_path, [bad])
    assert read_texts(tmp_path / "out_text_document") == ["a"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "the input .*a.jsonl is empty"),
        ("\n \n", "the input .*a.jsonl holds nothing but blank lines"),
        ('{"text": ""}\n{"text": ""}\n', "none of the 2 documents in .*a.jsonl has a token"),
    ],
)
def test_an_input_without_text_is_an_error(tmp_path, content, reason):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=f"nothing to write for key 'text': {reason}"):
        run(tmp_path, [str(tmp_path / "a.jsonl")])
    assert outputs(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("x\n\n[]\n" * 2, "all 4 lines of .*a.jsonl were left out as bad"),
        (
            'x\n{"text": ""}\n',
            "1 documents in .*a.jsonl have no token, and the other 1 lines were left out as bad",
        ),
    ],
)
@pytest.mark.parametrize("shard_bytes", [None, 9])
def test_when_all_lines_are_bad_the_first_is_said_and_all_are_listed(
    tmp_path, content, said, shard_bytes
):
    (tmp_path / "a.jsonl").write_text(content)
    wishes = {"shard_bytes": shard_bytes}
    with pytest.raises(DataError, match=f"{said}, the first: .*a.jsonl, line 1: not JSON: 'x'"):
        run(tmp_path, [str(tmp_path / "a.jsonl")], on_error="skip", **wishes)
    listed = tmp_path / "bad.jsonl"
    with pytest.raises(DataError, match=f"{said} ..*bad.jsonl lists them., the first: .*line 1"):
        run(
            tmp_path,
            [str(tmp_path / "a.jsonl")],
            on_error="collect",
            bad_lines_path=str(listed),
            **wishes,
        )
    bad = sum(line in ("x", "[]") for line in content.split("\n"))
    assert len(listed.read_text().splitlines()) == bad
    assert outputs(tmp_path) == []


def test_one_key_without_text_leaves_no_files_of_the_others(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"src": "a", "dst": ""}])
    with pytest.raises(DataError, match="nothing to write for key 'src' and 'dst'"):
        run(tmp_path, [path], json_keys=("src", "dst"))
    assert outputs(tmp_path) == []


def test_an_input_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(DataError, match="cannot read --input .*none.jsonl: No such file"):
        run(tmp_path, [str(tmp_path / "none.jsonl")])
    with pytest.raises(DataError, match="cannot read --input .*: Is a directory"):
        run(tmp_path, [str(tmp_path)])


def test_an_output_that_cannot_be_written_is_named(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    with pytest.raises(DataError, match="cannot write .*nowhere/out.stage: No such"):
        run(tmp_path, [path], output_prefix=str(tmp_path / "nowhere" / "out"))


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


def test_a_first_look_names_what_is_wrong_with_each_input(tmp_path):
    (tmp_path / "plain.txt").write_text("\nonce upon\n")
    (tmp_path / "empty.jsonl").write_text("")
    keyless = write_lines(tmp_path / "keyless.jsonl", [{"body": "a"}])
    good = write_lines(tmp_path / "good.jsonl", [{"text": "a"}])
    (tmp_path / "packed.gz").write_bytes(gzip.compress(b"\n" * 70 + b"once upon\n"))
    names = ["plain.txt", "packed.gz", "empty.jsonl", "none.jsonl"]
    inputs = [*(str(tmp_path / name) for name in names), keyless, good]
    plain, packed, missing, no_key = input_problems(inputs, ["text"])
    assert "plain.txt, line 2: not JSON: 'once upon'" in plain
    assert "packed.gz, line 71: not JSON: 'once upon'" in packed
    assert "cannot read --input" in missing
    assert "no key 'text'" in no_key


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
