"""The .bin/.idx format, against a second implementation that packs it field by field."""

import errno
import io
import os
import resource
import signal
import struct
from contextlib import contextmanager

import numpy as np
import pytest
from children import status_of_fork
from problems import problem

from megatron.common.errors import DataError
from megatron.data.token_files.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetWriter,
    best_dtype,
    open_token_files,
)

DOCUMENTS = [[1, 2, 3], [], [65535], [7, 0, 7, 0, 7]]


def packed_pair(documents, *, code=8, letter="H"):
    """Return the bytes of .bin and .idx, written from the format's description."""
    flat = [token for document in documents for token in document]
    sizes = [len(document) for document in documents]
    itemsize = struct.calcsize(letter)
    pointers, end = [], 0
    for size in sizes:
        pointers.append(end)
        end += size * itemsize
    idx = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    idx += struct.pack("<QQ", len(sizes), len(sizes) + 1)
    idx += struct.pack(f"<{len(sizes)}i", *sizes)
    idx += struct.pack(f"<{len(sizes)}q", *pointers)
    idx += struct.pack(f"<{len(sizes) + 1}q", *range(len(sizes) + 1))
    return struct.pack(f"<{len(flat)}{letter}", *flat), idx


def write_packed(prefix, documents, **kind):
    bin_bytes, idx_bytes = packed_pair(documents, **kind)
    prefix.with_suffix(".bin").write_bytes(bin_bytes)
    prefix.with_suffix(".idx").write_bytes(idx_bytes)
    return prefix


def write(prefix, documents, dtype="u2"):
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.append(document)
    return prefix


@pytest.mark.parametrize(("dtype", "code", "letter"), [("u2", 8, "H"), ("i4", 4, "i")])
def test_written_bytes_are_those_of_the_description(tmp_path, dtype, code, letter):
    write(tmp_path / "c", DOCUMENTS, dtype)
    bin_bytes, idx_bytes = packed_pair(DOCUMENTS, code=code, letter=letter)
    assert (tmp_path / "c.bin").read_bytes() == bin_bytes
    assert (tmp_path / "c.idx").read_bytes() == idx_bytes


def test_documents_appended_together_give_the_same_bytes(tmp_path, small_chunks):
    flat = [token for document in DOCUMENTS * 5 for token in document]
    with IndexedDatasetWriter(tmp_path / "c", "u2") as writer:
        writer.append(flat, [len(document) for document in DOCUMENTS * 5])
        assert (writer.num_documents, writer.num_tokens) == (20, len(flat))
    bin_bytes, idx_bytes = packed_pair(DOCUMENTS * 5)
    assert (tmp_path / "c.bin").read_bytes() == bin_bytes
    assert (tmp_path / "c.idx").read_bytes() == idx_bytes


@pytest.mark.parametrize(
    ("code", "letter"),
    [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (6, "d"), (7, "d"), (8, "H")],
)
def test_every_type_code_is_read(tmp_path, code, letter):
    documents = [[1, 2, 3], [], [4, 5]]
    dataset = IndexedDataset(write_packed(tmp_path / "c", documents, code=code, letter=letter))
    assert [dataset[i].tolist() for i in range(len(dataset))] == documents
    assert dataset.document_starts.tolist() == [0, 1, 2, 3]
    dataset.verify()


def test_get_reads_a_part_of_a_sequence(tmp_path):
    dataset = IndexedDataset(write_packed(tmp_path / "c", DOCUMENTS))
    assert dataset.get(3, 1, 2).tolist() == [0, 7]
    assert dataset.get(3, 3).tolist() == [0, 7]
    assert dataset.get(3, 5).tolist() == []


def test_get_refuses_what_is_not_there(tmp_path):
    dataset = IndexedDataset(write_packed(tmp_path / "c", DOCUMENTS))
    with problem("sequence 4 of 4", IndexError):
        dataset[4]
    with problem("3 to 6 … sequence 3 … 5 tokens", ValueError):
        dataset.get(3, 3, 3)


def test_an_empty_dataset_opens(tmp_path):
    dataset = IndexedDataset(write(tmp_path / "c", []))
    assert len(dataset) == 0
    assert packed_pair([])[1] == (tmp_path / "c.idx").read_bytes()
    dataset.verify()


def test_offsets_beyond_32_bits_are_read(tmp_path):
    """A sparse file of more than 4 GiB whose last document has tokens."""
    far = (1 << 32) + 2
    sizes = [(1 << 31) - 1, 2, 3]
    pointers = [0, far - 4, far]
    idx = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4)
    idx += (
        struct.pack("<3i", *sizes) + struct.pack("<3q", *pointers) + struct.pack("<4q", 0, 1, 2, 3)
    )
    (tmp_path / "c.idx").write_bytes(idx)
    with (tmp_path / "c.bin").open("wb") as file:
        file.seek(far)
        file.write(struct.pack("<3H", 11, 12, 13))
    dataset = IndexedDataset(tmp_path / "c")
    assert dataset[2].tolist() == [11, 12, 13]
    dataset.verify()


@pytest.mark.parametrize("removed", [".bin", ".idx"])
def test_a_missing_file_is_named(tmp_path, removed):
    prefix = write(tmp_path / "c", DOCUMENTS)
    prefix.with_suffix(removed).unlink()
    with problem(f"c{removed} missing … suffix", DataError):
        IndexedDataset(prefix)


def test_a_path_with_suffix_is_explained(tmp_path):
    write(tmp_path / "c", DOCUMENTS)
    with problem("did you mean … /c?", DataError):
        IndexedDataset(tmp_path / "c.bin")


@pytest.mark.parametrize(
    ("suffix", "cut", "message"),
    [
        (".bin", 17, "c.bin … truncated … 18 bytes … 17 … again"),
        (".bin", 0, "c.bin … truncated … 18 bytes … 0 … again"),
        (".idx", 121, "c.idx … truncated … 122 bytes … 121 … again"),
        (".idx", 33, "c.idx … truncated … 33 of 34"),
        (".idx", 5, "c.idx … truncated … 5 of 34"),
        (".idx", 0, "c.idx … truncated … 0 of 34"),
    ],
)
def test_a_truncated_file_is_named_with_its_bytes(tmp_path, suffix, cut, message):
    prefix = write(tmp_path / "c", DOCUMENTS)
    os.truncate(prefix.with_suffix(suffix), cut)
    with problem(message, DataError):
        IndexedDataset(prefix)


@pytest.mark.parametrize(("suffix", "expected", "found"), [(".bin", 18, 20), (".idx", 122, 124)])
def test_a_file_that_is_too_long_is_named(tmp_path, suffix, expected, found):
    prefix = write(tmp_path / "c", DOCUMENTS)
    with prefix.with_suffix(suffix).open("ab") as file:
        file.write(b"\0\0")
    with problem(f"c{suffix} … {expected} … {found} … again", DataError):
        IndexedDataset(prefix)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"TNTIDX\0\0", "--dataset-impl mmap … b'TNTIDX … preprocess_data"),
        (9, b"\2", "version 2 … 1"),
        (17, b"\x09", "type code 9 … 1 to 8"),
    ],
)
def test_another_format_is_refused(tmp_path, offset, value, message):
    prefix = write(tmp_path / "c", DOCUMENTS)
    with prefix.with_suffix(".idx").open("r+b") as file:
        file.seek(offset)
        file.write(value)
    with problem(f"c.idx … {message}", DataError):
        IndexedDataset(prefix)


def test_verify_finds_a_damaged_pointer(tmp_path, small_chunks):
    prefix = write(tmp_path / "c", DOCUMENTS)
    with prefix.with_suffix(".idx").open("r+b") as file:
        file.seek(34 + 4 * 4 + 8 * 2)
        file.write(struct.pack("<q", 4))
    dataset = IndexedDataset(prefix)
    with problem("c.idx … sequence 2 … size 1 … byte 4 … 6", DataError):
        dataset.verify()


def test_a_failure_leaves_nothing_behind_and_the_old_pair_alone(tmp_path):
    prefix = write(tmp_path / "c", DOCUMENTS)
    with pytest.raises(KeyError), IndexedDatasetWriter(prefix, "u2") as writer:
        writer.append([1])
        raise KeyError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.bin", "c.bin.xxh3", "c.idx"]
    assert len(IndexedDataset(prefix)) == len(DOCUMENTS)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_writer_that_is_killed_leaves_no_index_of_other_tokens(tmp_path, suffix):
    prefix = write(tmp_path / "c", DOCUMENTS)
    older = prefix.with_suffix(".bin").read_bytes()

    def write_until_killed():
        replace = os.replace

        def killed(source, target):
            if str(target) == f"{prefix}{suffix}":
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)

        os.replace = killed
        write(prefix, [[7, 7, 7]])

    assert status_of_fork(write_until_killed) == signal.SIGKILL
    is_older = prefix.with_suffix(".bin").read_bytes() == older
    assert is_older == (suffix == ".bin")
    assert not prefix.with_suffix(".idx").exists()
    write(prefix, [[7, 7, 7]])
    assert IndexedDataset(prefix)[0].tolist() == [7, 7, 7]
    assert sorted(path.name for path in tmp_path.glob("c.*")) == ["c.bin", "c.bin.xxh3", "c.idx"]


@pytest.mark.parametrize("token", [65536, -1])
def test_a_token_that_does_not_fit_is_refused(tmp_path, token):
    with (
        problem(f"{token} … uint16 … c.bin", DataError),
        IndexedDatasetWriter(tmp_path / "c", "u2") as writer,
    ):
        writer.append([1, token])
    assert not list(tmp_path.iterdir())


def test_sizes_that_do_not_cover_the_tokens_are_refused(tmp_path):
    with (
        problem("sizes … 3 … 2", ValueError),
        IndexedDatasetWriter(tmp_path / "c", "u2") as writer,
    ):
        writer.append([1, 2], [3])


def test_a_directory_that_is_not_there_is_named(tmp_path):
    with problem("write … nowhere/c.bin: No such file", DataError):
        IndexedDatasetWriter(tmp_path / "nowhere" / "c", "u2")


@contextmanager
def files_no_larger_than(num_bytes):
    """Make every longer write fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("num_tokens", [100, 100_000])
def test_a_full_disk_is_an_error_that_leaves_nothing_behind(tmp_path, num_tokens):
    with files_no_larger_than(64):
        with (
            problem("write … c.bin: File too large", DataError),
            IndexedDatasetWriter(tmp_path / "c", "u2") as writer,
        ):
            writer.append(np.ones(num_tokens, np.int64))
        assert not list(tmp_path.iterdir())


def test_best_dtype_is_two_bytes_below_65500():
    assert best_dtype(65499) == np.uint16
    assert best_dtype(65500) == np.int32


def test_files_that_the_disk_does_not_give_back_are_named(tmp_path, os_calls):
    with IndexedDatasetWriter(tmp_path / "c", "u2") as writer:
        writer.append([1, 2])
    os_calls("open", errno.EIO, on=".idx", module=io)
    with problem("c.idx: Input/output error", DataError):
        open_token_files(tmp_path / "c")
