"""Merging: the bytes of a single conversion, past 32 bits too, or nothing at all."""

import os
import signal
import struct
from socket import gethostname

import numpy as np
import pytest
from children import status_of_fork
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problem

from megatron.common import atomic_files
from megatron.common.atomic_files import temporary_beside
from megatron.common.errors import DataError
from megatron.common.process_identity import start_of
from megatron.data.token_files import merge as merge_module
from megatron.data.token_files.copying import Extent, copy_extents, lay_end_to_end
from megatron.data.token_files.index_files import INDEX_WRITERS, IndexContent
from megatron.data.token_files.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetWriter,
    open_token_files,
)
from megatron.data.token_files.merge import merge, merged_content

DOCUMENTS = [[1, 2, 3], [], [65535], [7, 0, 7, 0, 7]]


def write(prefix, documents, dtype="u2"):
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.append(document)
    return str(prefix)


def write_sentences(prefix, documents, dataset_impl, dtype="<u2"):
    """Write documents of several sequences each, in any format."""
    sentences = [sentence for document in documents for sentence in document]
    np.array([t for s in sentences for t in s], dtype).tofile(f"{prefix}.bin")
    starts = np.cumsum([0, *map(len, documents)])
    content = IndexContent(
        dtype=np.dtype(dtype),
        num_sequences=len(sentences),
        num_documents=len(documents),
        sizes=lambda: iter([np.array([len(s) for s in sentences], "<i8")]),
        document_starts=lambda: iter([starts]),
    )
    with open(f"{prefix}.idx", "wb") as file:
        INDEX_WRITERS[dataset_impl](file, content)
    return str(prefix)


def pair(prefix):
    return [open(f"{prefix}{suffix}", "rb").read() for suffix in (".bin", ".idx")]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_merge_equals_one_conversion(tmp_path, workers, small_chunks):
    parts = [DOCUMENTS, [[9]], [], DOCUMENTS * 3]
    prefixes = [write(tmp_path / f"p{i}", documents) for i, documents in enumerate(parts)]
    complete = write(tmp_path / "whole", [document for part in parts for document in part])
    merged = merge(prefixes, str(tmp_path / "merged"), workers=workers)
    assert pair(merged.prefix) == pair(complete)
    assert (merged.documents, merged.sequences, merged.tokens) == (17, 17, 37)
    assert not list(tmp_path.glob("*.tmp"))


@given(
    parts=st.lists(
        st.lists(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=3), max_size=5),
        min_size=1,
        max_size=4,
    ),
    dataset_impl=st.sampled_from(["lazy", "mmap"]),
)
@settings(max_examples=30, deadline=None)
def test_sentences_and_documents_survive_in_both_formats(tmp_path_factory, parts, dataset_impl):
    folder = tmp_path_factory.mktemp("merge")
    prefixes = [write_sentences(folder / f"p{i}", p, dataset_impl) for i, p in enumerate(parts)]
    complete = write_sentences(folder / "whole", [d for part in parts for d in part], dataset_impl)
    merge(prefixes, str(folder / "merged"))
    assert pair(folder / "merged") == pair(complete)


def test_the_older_format_is_that_of_its_description(tmp_path):
    prefix = write_sentences(tmp_path / "old", [[[1, 2], [3]], [], [[4]]], "cached")
    expected = b"TNTIDX\0\0" + struct.pack("<QQQQQQ", 1, 8, 2, 3, 3, 4)
    expected += struct.pack("<4q", 0, 1, 2, 3) + struct.pack("<4q", 0, 2, 3, 4)
    expected += struct.pack("<3q", 2, 1, 1) + struct.pack("<4q", 0, 2, 2, 3)
    assert pair(prefix)[1] == expected


@pytest.mark.parametrize("dataset_impl", ["lazy", "cached", "mmap", "infer"])
def test_every_format_reads_alike(tmp_path, dataset_impl):
    documents = [[[1, 2], [3]], [[4, 5, 6]]]
    written = "mmap" if dataset_impl == "infer" else dataset_impl
    dataset = open_token_files(write_sentences(tmp_path / "a", documents, written), dataset_impl)
    dataset.verify()
    assert [dataset[i].tolist() for i in range(len(dataset))] == [[1, 2], [3], [4, 5, 6]]
    assert dataset.get(2, offset=1, length=1).tolist() == [5]
    assert dataset.document_starts.tolist() == [0, 2, 3]
    assert dataset.pointers.tolist() == [0, 4, 6]
    assert dataset.sizes.tolist() == [2, 1, 3]


LEGACY_DAMAGE = [
    (slice(0, 8), b"PNGIDX\0\0", "--dataset-impl lazy … b'PNGIDX"),
    (slice(8, 16), struct.pack("<Q", 2), "version 2 … 1"),
    (slice(16, 24), struct.pack("<Q", 9), "type code 9 … 1 to 8"),
    (slice(24, 32), struct.pack("<Q", 4), "4 bytes … type code 8 has 2"),
    (slice(32, 40), struct.pack("<Q", 4), "3 dimensions … 4 sequences"),
    (slice(30, None), b"", "truncated … 30 of 56"),
    (slice(-8, None), b"", "truncated … 168 bytes … 160"),
    (slice(-8, None), struct.pack("<q", 2), "documents … 0 to 3"),
    (slice(96, 104), struct.pack("<q", 1), "sequence 0 … 0 to 1 … 0"),
]


@pytest.mark.parametrize(("position", "value", "message"), LEGACY_DAMAGE)
def test_damage_to_the_older_format_is_named(tmp_path, position, value, message):
    prefix = write_sentences(tmp_path / "a", [[[1, 2], [3]], [[4]]], "lazy")
    content = bytearray(pair(prefix)[1])
    content[position] = value
    (tmp_path / "a.idx").write_bytes(content)
    with problem(f"a.idx … {message}", DataError):
        open_token_files(prefix, "lazy").verify()


def test_mixed_kinds_are_named_together_and_nothing_is_written(tmp_path):
    small = write(tmp_path / "small", DOCUMENTS)
    large = write(tmp_path / "large", DOCUMENTS, "i4")
    old = write_sentences(tmp_path / "old", [[[1]]], "lazy")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError) as caught:
        merge([small, large, old, str(tmp_path / "none")], str(tmp_path / "out"))
    missing, dtypes, formats = str(caught.value).splitlines()
    assert "none.bin" in missing
    assert "small holds uint16 tokens in the mmap format" in dtypes
    assert "large holds int32 tokens in the mmap format" in dtypes
    assert "old holds uint16 tokens in the cached format" in formats
    assert sorted(tmp_path.iterdir()) == before


def test_a_damaged_input_is_refused(tmp_path):
    prefix = write(tmp_path / "a", DOCUMENTS)
    with (tmp_path / "a.idx").open("r+b") as file:
        file.seek(34 + 12 * 4 + 8)
        file.write(struct.pack("<q", 77))
    with problem("a.idx … documents … 0 to 4", DataError):
        merge([prefix], str(tmp_path / "out"))
    (tmp_path / "a.bin").write_bytes(b"12")
    with problem("a.bin … truncated … 18 bytes … 2", DataError):
        merge([prefix], str(tmp_path / "out"))


def merge_that_is_killed(prefix, output):
    """Merge in a process of its own that is killed when the tokens are copied."""

    def in_fork():
        merge_module.publish_pair = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
        merge([prefix], output)

    assert status_of_fork(in_fork) == signal.SIGKILL


def test_what_a_killed_merge_left_is_removed_by_the_next(tmp_path, caplog):
    prefix = write(tmp_path / "a", DOCUMENTS)
    output = tmp_path / "[out]"
    merge_that_is_killed(prefix, str(output))
    merge_that_is_killed(prefix, str(output))
    left = sorted(path.name for path in tmp_path.glob("*.tmp"))
    assert len(left) == 3  # the first one's were removed
    host = gethostname()[:20]
    for name, suffix in zip(left, (".bin", ".bin.xxh3", ".idx"), strict=True):
        assert name.startswith(f"[out]{suffix}.{host}.")
    merge([prefix], str(output))
    assert not list(tmp_path.glob("*.tmp"))
    assert pair(output) == pair(prefix)
    assert not caplog.records


def test_a_temporary_file_stays_while_its_process_may_live(tmp_path, monkeypatch, caplog):
    target = tmp_path / "out.bin"
    ours = temporary_beside(target)
    pid, own = f"-{os.getpid()}-{start_of(os.getpid())}-", ours.name
    of_another_user = target.with_name(own.replace(pid, f"-1-{start_of(1)}-"))
    of_an_ended_process = target.with_name(own.replace(pid, f"-{os.getpid()}-1-"))
    of_an_ended_process.touch()
    monkeypatch.setattr(atomic_files, "_machine", lambda: "0123abcd")
    theirs = temporary_beside(target)  # as another machine, or a container, names it
    monkeypatch.undo()
    older = tmp_path / "out.bin.1234-0123abcd.tmp"  # as an earlier version named them
    files = [ours, of_another_user, theirs, older]
    for path in files:
        path.touch()
    temporary_beside(target)
    assert all(path.exists() for path in files)
    assert not of_an_ended_process.exists()
    assert not caplog.records
    for path in files:
        os.utime(path, (0, 0))
    temporary_beside(target)
    assert all(path.exists() for path in files)
    logged = [record.getMessage() for record in caplog.records]
    assert sorted(logged) == sorted(
        f"{path} has not changed for long; remove it if nothing writes there"
        for path in (theirs, older)
    )


def test_the_output_may_not_be_an_input(tmp_path):
    prefix = write(tmp_path / "a", DOCUMENTS)
    with problem("--output-prefix … /a … --datasets", DataError):
        merge([prefix], str(tmp_path / ".." / tmp_path.name / "a"))
    assert len(IndexedDataset(prefix)) == 4


def write_sparse(prefix, num_sequences, size):
    """Write a pair of many gigabytes that takes no room, with a mark at its end."""
    num_bytes = num_sequences * size * 2
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(num_bytes)
        file.seek(num_bytes - 2)
        file.write(struct.pack("<H", 77))
    content = IndexContent(
        dtype=np.dtype("<u2"),
        num_sequences=num_sequences,
        num_documents=num_sequences,
        sizes=lambda: iter([np.full(num_sequences, size, "<i8")]),
        document_starts=lambda: iter([np.arange(num_sequences + 1)]),
    )
    with open(f"{prefix}.idx", "wb") as file:
        INDEX_WRITERS["mmap"](file, content)
    return str(prefix)


def test_tokens_past_two_to_the_31_and_bytes_past_two_to_the_32(tmp_path):
    half = write_sparse(tmp_path / "half", 3, 2**29)
    merge([half, half], str(tmp_path / "out"), workers=2)
    merged = IndexedDataset(tmp_path / "out")
    merged.verify()
    assert len(merged.tokens) == 6 * 2**29 > 2**31
    assert int(merged.pointers[-1]) == 5 * 2**30 > 2**32
    ends = [int(merged.get(i, offset=2**29 - 1)[0]) for i in range(6)]
    assert ends == [0, 0, 77] * 2
    assert (tmp_path / "out.bin").stat().st_blocks * 512 < 2**27


def test_an_index_does_not_enter_memory_at_once(tmp_path, small_chunks):
    dataset = IndexedDataset(write(tmp_path / "a", DOCUMENTS))
    content = merged_content([dataset, dataset])
    assert max(len(piece) for piece in content.sizes()) == 2
    assert max(len(piece) for piece in content.document_starts()) == 2


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=6), workers=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_pieces_copied_by_threads_make_the_full_file(tmp_path_factory, sizes, workers):
    folder = tmp_path_factory.mktemp("copy")
    sources = []
    for i, size in enumerate(sizes):
        sources.append(folder / str(i))
        sources[-1].write_bytes(bytes([65 + i]) * size)
    copy_extents(lay_end_to_end(sources), folder / "out", workers=workers, piece_bytes=7)
    assert (folder / "out").read_bytes() == b"".join(s.read_bytes() for s in sources)


def test_a_range_is_copied_by_any_buffer(tmp_path):
    (tmp_path / "a").write_bytes(bytes(range(100)))
    copy_extents([Extent(tmp_path / "a", 10, 5, 80)], tmp_path / "out", buffer_bytes=7)
    assert (tmp_path / "out").read_bytes() == bytes(5) + bytes(range(10, 90))


@pytest.mark.parametrize("workers", [1, 3])
def test_a_source_that_shrinks_is_an_error(tmp_path, workers):
    (tmp_path / "a").write_bytes(bytes(10))
    with problem("a … byte 10 … 20", DataError):
        copy_extents([Extent(tmp_path / "a", 0, 0, 20)], tmp_path / "out", workers=workers)
