"""Tokens on disk: damage, cuts and failing disks are errors that name the file, and kill no process."""

import errno
import mmap
import os
import resource
import struct
from pathlib import Path

import numpy as np
import pytest
from problems import problem

from megatron.common.errors import DataError
from megatron.data.datasets.gpt_dataset import GPTDataset
from megatron.data.token_files import block_digests
from megatron.data.token_files.block_digests import BLOCK_BYTES, digests_path
from megatron.data.token_files.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetWriter,
    open_token_files,
)
from megatron.data.token_files.merge import merge
from megatron.data.token_files.token_file import TokenFile

TOKENS = np.arange(100_000) % 50_000  # four blocks of which the last is short
BLOCK_TOKENS = BLOCK_BYTES // 2


@pytest.fixture
def prefix(tmp_path):
    """Token files of 100 documents, with digests."""
    with IndexedDatasetWriter(tmp_path / "c", "u2") as writer:
        writer.append(TOKENS, [1000] * 100)
    return str(tmp_path / "c")


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def samples_of(prefix):
    return GPTDataset(IndexedDataset(prefix), range(100), num_samples=100, seq_length=999, seed=1)


def test_slices_are_those_of_the_array(prefix):
    tokens = IndexedDataset(prefix).tokens
    assert len(tokens) == len(TOKENS)
    for bounds in [(0, 1), (BLOCK_TOKENS - 1, BLOCK_TOKENS + 1), (99_990, 200_000), (5, 5)]:
        assert tokens[slice(*bounds)].tolist() == TOKENS[slice(*bounds)].tolist()
    assert tokens[:].tolist() == TOKENS.tolist()
    assert tokens[7:3].size == 0
    starts, stops = [99_990, 5, 7, BLOCK_TOKENS, 0], [100_000, 5, 9, 3 * BLOCK_TOKENS, 1]
    expected = [TOKENS[start:stop] for start, stop in zip(starts, stops, strict=True)]
    for _ in range(2):
        assert tokens.gather(starts, stops).tolist() == np.concatenate(expected).tolist()
    assert not tokens[:3].flags.writeable


def test_a_damaged_block_is_an_error_when_it_is_first_read(prefix):
    """One bit, which no other check can find: the token stays in the vocabulary."""
    flip(f"{prefix}.bin", 2 * BLOCK_BYTES + 6)
    tokens = IndexedDataset(prefix).tokens
    assert tokens[: 2 * BLOCK_TOKENS].tolist() == TOKENS[: 2 * BLOCK_TOKENS].tolist()
    message = f"c.bin … {2 * BLOCK_BYTES} to {3 * BLOCK_BYTES} … c.bin.xxh3 … --write-digests"
    for _ in range(2):
        with problem(message, DataError):
            tokens[2 * BLOCK_TOKENS - 1 : 2 * BLOCK_TOKENS + 1]
    with problem(message, DataError):
        list(samples_of(prefix))


def test_each_block_is_compared_once(prefix, os_calls):
    tokens = IndexedDataset(prefix).tokens
    reads = os_calls("pread")
    for _ in range(3):
        tokens[10:20]
    # Tokens thrice, the block that they are in once, and its digest.
    assert sorted(reads) == [f"{prefix}.bin"] * 4 + [f"{prefix}.bin.xxh3"]


def test_files_without_digests_are_read_as_they_are(prefix):
    digests_path(IndexedDataset(prefix).bin_path).unlink()
    expected = [sample["tokens"].tolist() for sample in samples_of(prefix)]
    flip(f"{prefix}.bin", 6)
    damaged = IndexedDataset(prefix)
    damaged.tokens.verify()
    assert not damaged.tokens.has_digests
    assert [sample["tokens"].tolist() for sample in samples_of(prefix)] != expected


def test_all_damaged_blocks_are_counted(prefix):
    flip(f"{prefix}.bin", 6)
    flip(f"{prefix}.bin", 3 * BLOCK_BYTES + 6)
    with problem("c.bin … 0 to 65536 … 2 of 4 … --write-digests", DataError):
        IndexedDataset(prefix).tokens.verify()


@pytest.mark.parametrize(
    ("offset", "content", "message"),
    [
        (0, b"x", r"b'xINXXH3\x00' … b'BINXXH3\x00'"),
        (8, struct.pack("<Q", 2), "version 2 … 65536"),
        (16, struct.pack("<Q", 4096), "blocks of 4096"),
        (24, struct.pack("<Q", 4), "4 bytes … c.bin … 200000"),
        (72, b"more", "76 bytes … 72"),
    ],
)
def test_digests_of_another_file_are_refused_with_a_remedy(prefix, offset, content, message):
    with open(f"{prefix}.bin.xxh3", "r+b") as file:
        file.seek(offset)
        file.write(content)
    with problem(f"c.bin.xxh3 … {message} … --write-digests", DataError):
        IndexedDataset(prefix)


def test_digests_are_opened_once_and_read_by_pages(prefix, os_calls):
    """Of a corpus read at random, every block is new for a long time."""
    opened, read = os_calls("open"), os_calls("pread")
    IndexedDataset(prefix).tokens.verify()
    assert opened.count(f"{prefix}.bin.xxh3") == 1
    assert read.count(f"{prefix}.bin.xxh3") == 2  # the header, and one page for four blocks


def test_blocks_of_every_page_are_compared_with_their_own_digests(prefix, monkeypatch):
    monkeypatch.setattr(block_digests, "_PAGE", 3)
    IndexedDataset(prefix).tokens.verify()
    flip(f"{prefix}.bin", 3 * BLOCK_BYTES)
    with problem("c.bin … 196608 to 200000 … --write-digests", DataError):
        IndexedDataset(prefix).tokens.verify()


def test_damaged_digests_are_distinguished_from_damaged_tokens(prefix):
    flip(f"{prefix}.bin.xxh3", 40 + 8 + 2)
    tokens = IndexedDataset(prefix).tokens
    tokens[:BLOCK_TOKENS]
    with problem("c.bin.xxh3 … c.bin … 65536 to 131072 … --write-digests", DataError):
        tokens[BLOCK_TOKENS : BLOCK_TOKENS + 1]


@pytest.mark.parametrize("has_digests", [True, False])
def test_a_file_that_is_cut_under_the_reader_is_an_error(prefix, has_digests):
    """Reading a mapped file there would end the process with SIGBUS."""
    if not has_digests:
        os.unlink(f"{prefix}.bin.xxh3")
    samples = samples_of(prefix)
    first = samples[0]["tokens"].tolist()
    os.truncate(f"{prefix}.bin", 10)
    with problem("c.bin … 200000 bytes … 10 now … copy", DataError):
        list(samples)
    assert len(first) == 1000


@pytest.mark.parametrize("replaced", [False, True])
def test_an_index_that_is_cut_under_the_reader_is_an_error(prefix, replaced):
    samples = samples_of(prefix)
    expected = [sample["tokens"].tolist() for sample in samples]
    if replaced:  # what was opened stays as it was
        os.unlink(f"{prefix}.idx")
        with open(f"{prefix}.idx", "wb"):
            assert [sample["tokens"].tolist() for sample in samples] == expected
        return
    os.truncate(f"{prefix}.idx", 40)
    with problem("c.idx … 40 now … copy", DataError):
        samples[1]


@pytest.mark.parametrize("name", ["sample_order.npy", "sample_starts.npy", "c.bin"])
def test_a_disk_that_fails_is_an_error_that_names_the_file(prefix, os_calls, name):
    samples = samples_of(prefix)
    os_calls("pread", errno.EIO, on=name)
    with problem(f"bytes … {name}: Input/output error", DataError):
        samples[0]


def test_a_long_read_goes_on_where_the_system_ends_it(prefix, monkeypatch):
    original = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, count, at: original(fd, min(count, 999), at))
    tokens = TokenFile(Path(f"{prefix}.bin"), np.dtype("<u2"))
    assert tokens[:].tolist() == list(TOKENS)
    assert tokens.gather([5, 0], [90_000, 2]).tolist() == [*TOKENS[5:90_000], 0, 1]


def test_a_blend_may_have_more_corpora_than_files_that_shells_allow(prefix):
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(descriptor) for descriptor in os.listdir("/proc/self/fd"))
    few = 2 * highest + 20  # the process may have many files open, with free numbers among them
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
        opened = [IndexedDataset(prefix) for _ in range(few)]
        assert len(opened) == few
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


def test_too_many_open_files_are_reported_with_the_limit_to_raise(prefix, os_calls):
    os_calls("open", errno.EMFILE)
    with problem("c.bin: Too many open files … ulimit -n", DataError):
        TokenFile(Path(f"{prefix}.bin"), np.dtype("<u2"))


def test_an_index_that_does_not_open_is_reported(prefix, os_calls):
    os_calls("mmap", errno.EMFILE, module=mmap)
    with problem("c.idx: Too many open files … ulimit -n", DataError):
        open_token_files(prefix)


def test_files_are_closed_with_their_data_set(prefix):
    before = len(os.listdir("/proc/self/fd"))
    dataset = IndexedDataset(prefix)
    assert len(os.listdir("/proc/self/fd")) > before
    del dataset
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_merge_does_not_take_over_damage(prefix, tmp_path):
    merge([prefix, prefix], str(tmp_path / "both"))
    IndexedDataset(tmp_path / "both").tokens.verify()
    assert (tmp_path / "both.bin.xxh3").exists()
    flip(f"{prefix}.bin", 6)
    with problem("c.bin … 0 to 65536 … --write-digests", DataError):
        merge([prefix, prefix], str(tmp_path / "damaged"))
    assert not list(tmp_path.glob("damaged*"))


def test_digests_that_are_a_fifo_are_refused_and_not_waited_for(prefix):
    path = digests_path(IndexedDataset(prefix).bin_path)
    path.unlink()
    os.mkfifo(path)
    with problem("c.bin.xxh3: not a regular file", DataError):
        IndexedDataset(prefix)
