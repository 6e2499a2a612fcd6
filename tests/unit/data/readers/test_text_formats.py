"""Plain text and JSON arrays as documents, whatever pieces they are read in."""

import bz2
import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bytes_tokenizer import BytesTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problem, require_problem

from megatron.common.errors import DataError
from megatron.data.preprocessing.command import read_flags
from megatron.data.preprocessing.preprocess import preprocess
from megatron.data.preprocessing.preprocess_spec import PreprocessSpec
from megatron.data.readers.inputs import files_in
from megatron.data.readers.text_formats import documents_of_text, unpacked_array
from megatron.data.token_files.indexed_dataset import IndexedDataset

TEXT = '\ufeff\r\n first é\nsecond\r\n  \n\n\tthird \\ "quoted"\n fourth\x00 \n\n'
BY_SEPARATOR = {
    "line": [" first é", "second", '\tthird \\ "quoted"', " fourth\x00 "],
    "blank-line": [" first é\nsecond", '\tthird \\ "quoted"\n fourth\x00 '],
    "file": [' first é\nsecond\n\n\n\tthird \\ "quoted"\n fourth\x00 '],
}


def run(tmp_path, *inputs, **options):
    options = {"make_encoder": BytesTokenizer, "output_prefix": str(tmp_path / "out")} | options
    (written,) = preprocess(PreprocessSpec(inputs=inputs, **options))
    dataset = IndexedDataset(written.prefix)
    return [bytes(dataset[i].astype("u1")).decode() for i in range(len(dataset))]


def in_pieces(data, size):
    return (data[i : i + size] for i in range(0, len(data), size))


@pytest.mark.parametrize("separator", BY_SEPARATOR)
@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress])
def test_documents_of_plain_text(tmp_path, separator, pack):
    (tmp_path / "corpus.txt").write_bytes(pack(TEXT.encode()))
    name = str(tmp_path / "corpus.txt")
    expected = BY_SEPARATOR[separator]
    for cut in ({}, {"chunk_size": 1}, {"shard_bytes": 20}):
        assert run(tmp_path, name, name, text=separator, block_bytes=5, **cut) == 2 * expected


def test_lines_of_plain_text_may_have_any_length(tmp_path):
    long = "a b" * 200_000
    (tmp_path / "corpus.txt").write_text(f"x\n{long}\n\n{long}y\n{' ' * 300_000}\nz")
    name = str(tmp_path / "corpus.txt")
    assert run(tmp_path, name, text="blank-line")[:2] == [
        f"x\n{long}",
        f"{long}y\n{' ' * 300_000}\nz",
    ]


@given(
    lines=st.lists(st.text('ab \t"\\é😀\x00', max_size=6), max_size=8),
    size=st.integers(1, 9),
    end=st.sampled_from(["\n", "\r\n"]),
)
@settings(max_examples=200, deadline=None)
def test_pieces_of_a_text_make_no_difference(lines, size, end):
    documents, open_lines = [], []
    for line in [*lines, ""]:
        if line.strip(" \t"):
            open_lines.append(line)
        elif open_lines:
            documents.append("\n".join(open_lines))
            open_lines = []
    pieces = in_pieces(end.join(lines).encode(), size)
    found = b"".join(documents_of_text(pieces, "blank-line"))
    assert [json.loads(line) for line in found.splitlines()] == documents


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('a"]}[{,\\é\u2028', max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("k]", max_size=2), inner),
    max_leaves=6,
)


@given(
    elements=st.lists(VALUES, max_size=6),
    size=st.integers(1, 40),
    indent=st.sampled_from([None, 1]),
    is_ascii=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_an_array_is_its_elements(elements, size, indent, is_ascii):
    text = " \n" + json.dumps(elements, indent=indent, ensure_ascii=is_ascii) + "\n "
    found = b"".join(unpacked_array(in_pieces(text.encode(), size), 1 << 20))
    assert [json.loads(line) for line in found.split(b"\n")[:-1]] == elements


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[{"text": "a"}', "array … end … ','"),
        ('[{"text": "a"} {"text": "b"}]', "array … '{' … ','"),
        ('[{"text": "a"}, {"text": b}]', "element 2 … not JSON"),
        ('[{"text": "a"}]{"text": "b"}', "text … end … array"),
        ('[{"text": "a"}, 5]', "element 2 … object … '5'"),
        ('["a", "b"]', "element 1 … object … '\"a\"' … jq -c"),
        ('{\n  "text": "a"\n}', "line 1 … object … jq -c . FILE"),
        ('[{"text": "a"}, {"id": 1}]', "element 2 … 'text' … 'id'"),
    ],
)
def test_a_bad_array_is_an_error(tmp_path, text, reason):
    (tmp_path / "corpus.json").write_text(text)
    with problem(f"corpus.json … {reason}", DataError):
        run(tmp_path, str(tmp_path / "corpus.json"))


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_arrays_are_converted_as_lines_are(tmp_path, stdin, pack):
    texts = [f"text {i} é" * i for i in range(1, 60)]
    packed = pack(json.dumps([{"text": text} for text in texts], indent=2).encode())
    (tmp_path / "corpus.json").write_bytes(packed)
    name = str(tmp_path / "corpus.json")
    for cut in ({}, {"chunk_size": 3}, {"shard_bytes": 30}):
        assert run(tmp_path, name, **cut) == texts
    stdin(packed)
    assert run(tmp_path, "-") == texts


def test_a_bad_document_is_left_out_and_listed(tmp_path):
    (tmp_path / "corpus.txt").write_bytes(b"a\n\nb\xff\n\nc\n")
    name, bad = str(tmp_path / "corpus.txt"), str(tmp_path / "bad")
    for separator, where in (("line", "line 3"), ("blank-line", "document 2")):
        with problem(f"{where} … UTF-8", DataError):
            run(tmp_path, name, text=separator)
        collected = {"on_error": "skip", "bad_lines_path": bad}
        assert run(tmp_path, name, text=separator, **collected) == ["a", "c"]
        assert "not a text in UTF-8" in (tmp_path / "bad").read_text()


class Dies(BytesTokenizer):
    """Bytes, until a text says otherwise."""

    def encode(self, text):
        if text == "n39" and not self.is_resumed:
            raise KeyboardInterrupt
        return super().encode(text)

    is_resumed = False


@pytest.mark.parametrize("separator", [None, "line", "blank-line"])
def test_a_conversion_of_texts_and_arrays_is_resumed(tmp_path, monkeypatch, separator):
    texts = [f"n{i}" for i in range(60)]
    full = json.dumps([{"text": t} for t in texts]) if separator is None else "\n\n".join(texts)
    (tmp_path / "corpus").write_text(full)
    name, cut = str(tmp_path / "corpus"), {"shard_bytes": 100}
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, name, text=separator, make_encoder=Dies, **cut)
    monkeypatch.setattr(Dies, "is_resumed", True)
    assert run(tmp_path, name, text=separator, make_encoder=Dies, resume=True, **cut) == texts


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "line 1: … 'plain text' … --input-format text … --document-separator"),
        ("--input-format json --document-separator file", "--document-separator … plain text"),
        ("--input-format text --json-keys a b", "--json-keys a b … plain text"),
        ("--document-separator file --conversations", "--conversations … --input-format"),
    ],
)
def test_flags_of_plain_text(tmp_path, flags, message):
    (tmp_path / "corpus").write_text("plain text\n")
    line = f"--input {tmp_path}/corpus --output-prefix {tmp_path}/out"
    # Each is reported together with the missing vocabulary.
    with problem("--vocab-size missing") as error:
        read_flags(
            [*line.split(), "--tokenizer-type", "NullTokenizer", *flags.split()], description=""
        )
    require_problem(message, error.value.problems)


def test_plain_text_is_read_by_the_flags(tmp_path):
    (tmp_path / "corpus.txt").write_text("1 2\n3\n\n4\n")
    line = f"--input {tmp_path}/corpus.txt --output-prefix {tmp_path}/out --tokenizer-type NullTokenizer"
    for flags, expected in (
        ("", [[1, 2], [3], [4]]),
        ("--input-format text", [[1, 2], [3], [4]]),
        ("--document-separator blank-line", [[1, 2, 3], [4]]),
        ("--input-format text --document-separator file", [[1, 2, 3, 4]]),
    ):
        words = [*line.split(), "--vocab-size", "9", *flags.split()]
        (written,) = preprocess(read_flags(words, description="").spec)
        dataset = IndexedDataset(written.prefix)
        assert [dataset[i].tolist() for i in range(len(dataset))] == expected


def test_a_folder_may_mix_json_and_text_by_suffix(tmp_path):
    folder = tmp_path / "texts"
    (folder / "more").mkdir(parents=True)
    (folder / "a.txt").write_text("1 2\n3\n")
    (folder / "b.jsonl").write_text('{"text": "4"}\n')
    (folder / "c.txt").write_text('{"text": "5"}\n')
    (folder / "more" / "d.txt.gz").write_bytes(gzip.compress(b"6\n"))
    (folder / "more" / "e.json.gz").write_bytes(gzip.compress(b'[{"text": "7"}]'))
    (folder / "LICENSE").write_text("8\n")
    line = f"--input {folder} --output-prefix {tmp_path}/out --tokenizer-type NullTokenizer"
    command = read_flags([*line.split(), "--vocab-size", "9"], description="")
    assert f"--input {folder}: 5 files; left out, by suffix: 1 without;" in command.notices[0]
    (written,) = preprocess(command.spec)
    dataset = IndexedDataset(written.prefix)
    assert [dataset[i].tolist() for i in range(len(dataset))] == [[1, 2], [3], [4], [5], [6], [7]]


def test_with_a_separator_all_files_but_tables_are_text(tmp_path):
    (tmp_path / "a.jsonl").write_text("1\n\n2 3\n4\n")
    (tmp_path / "b").write_text("5\n")
    pq.write_table(pa.table({"text": ["6", "7"]}), tmp_path / "c.parquet")
    line = (
        f"--input {tmp_path}/a.jsonl {tmp_path}/b {tmp_path}/c.parquet --vocab-size 9 "
        f"--output-prefix {tmp_path}/out --tokenizer-type NullTokenizer"
    )
    command = read_flags([*line.split(), "--document-separator", "blank-line"], description="")
    (written,) = preprocess(command.spec)
    dataset = IndexedDataset(written.prefix)
    assert [dataset[i].tolist() for i in range(len(dataset))] == [[1], [2, 3, 4], [5], [6], [7]]


def test_of_a_folder_hidden_files_outputs_and_markdown_beside_data_are_no_documents(tmp_path):
    names = ("README.md", "out.report.json", "out_text_document.tokenizer.json", "out.idx")
    others = (".git/a.json", "more/.cache/b.txt", "out.stage/state.json", ".c.txt")
    for name in ("a.txt", *names, *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    documents = [str(tmp_path / "README.md"), str(tmp_path / "a.txt")]
    outputs = {".report.json": 1, ".tokenizer.json": 1, ".idx": 1}
    assert files_in(str(tmp_path)) == (documents, outputs)
    (tmp_path / "b.json.gz").write_bytes(b"")
    documents[0] = str(tmp_path / "b.json.gz")
    assert files_in(str(tmp_path)) == (sorted(documents), {**outputs, ".md": 1})


def test_json_in_the_folder_is_all_that_conversations_and_keys_take(tmp_path):
    (tmp_path / "a.txt").write_text("1 2\n")
    line = f"--input {tmp_path} --output-prefix {tmp_path}/out --tokenizer-type NullTokenizer"
    words = [*line.split(), "--vocab-size", "9", "--json-keys", "text", "title"]
    with problem("a.txt … --input-format text", DataError):
        preprocess(read_flags(words, description="").spec)
