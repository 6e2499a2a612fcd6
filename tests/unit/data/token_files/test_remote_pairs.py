"""Token files at URLs: blocks on demand, digests, cut connections, several processes, new files."""

import os
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from object_store import BUCKET
from problems import problem

from megatron.common import remote_files
from megatron.common.errors import DataError, WrongDataError
from megatron.common.remote_files import exists, remove, upload, write_text
from megatron.data.token_files.block_digests import BLOCK_BYTES
from megatron.data.token_files.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.data.token_files.merge import merge
from megatron.data.token_files.remote_pairs import CHUNK_BLOCKS, local_pair, upload_pair

CHUNK = CHUNK_BLOCKS * BLOCK_BYTES


def write_pair(prefix, *, documents=60, first=0):
    """Write token files of two and a half chunks."""
    with IndexedDatasetWriter(prefix, "u2") as writer:
        for i in range(documents):
            writer.append(np.arange(first + i, first + i + CHUNK // 48) % 60000)


def put(prefix, url, ends=(".bin", ".bin.xxh3", ".idx")):
    for end in ends:
        upload(Path(f"{prefix}{end}"), url + end)


@pytest.fixture
def pair(store, tmp_path):
    """Return the prefix of token files on this machine and their URL."""
    write_pair(tmp_path / "corpus")
    url = f"{BUCKET}/{tmp_path.name}/corpus"
    put(tmp_path / "corpus", url)
    return str(tmp_path / "corpus"), url


def bytes_on_disk(path):
    return os.stat(path).st_blocks * 512


@pytest.mark.parametrize("has_digests", [True, False])
def test_blocks_are_downloaded_when_they_are_read_and_kept(pair, store, tmp_path, has_digests):
    prefix, url = pair
    if not has_digests:
        remove(f"{url}.bin.xxh3")
    here = IndexedDataset(prefix)
    there = IndexedDataset(local_pair(url, tmp_path / "cache"))
    assert bytes_on_disk(there.bin_path) == 0
    assert (there[0] == here[0]).all()
    assert 0 < bytes_on_disk(there.bin_path) <= CHUNK + BLOCK_BYTES
    assert there.tokens.has_digests
    store.proxy.cut_next(3, after=1 << 20)
    for i in range(len(here)):
        assert (there[i] == here[i]).all()
    assert store.proxy.cut == 3
    assert there.bin_path.read_bytes() == here.bin_path.read_bytes()

    store.proxy.cut_next(10**6, after=1000)  # what is cached needs no connection for its blocks
    again = IndexedDataset(there.prefix)
    starts = list(range(0, len(again.tokens), 70000))
    assert again.tokens.gather(starts, [s + 9 for s in starts]).tobytes() == (
        here.tokens.gather(starts, [s + 9 for s in starts]).tobytes()
    )
    again.tokens.verify()
    store.proxy.cut_next(0, after=0)


def test_damaged_blocks_of_the_cache_are_downloaded_again_and_of_the_url_refused(pair, tmp_path):
    prefix, url = pair
    here, local = IndexedDataset(prefix), local_pair(url, tmp_path / "cache")
    IndexedDataset(local).tokens.verify()
    with Path(f"{local}.bin").open("r+b") as file:
        file.seek(100)
        file.write(b"damage")
    assert (IndexedDataset(local)[0] == here[0]).all()

    content = bytearray(Path(f"{prefix}.bin").read_bytes())
    content[BLOCK_BYTES + 5] ^= 1
    (tmp_path / "damaged").write_bytes(content)
    upload(tmp_path / "damaged", f"{url}.bin")
    dataset = IndexedDataset(local_pair(url, tmp_path / "cache"))
    assert dataset.tokens[0:100].tobytes() == here.tokens[0:100].tobytes()
    with problem(f"{url}.bin … {url}.bin.xxh3 … 65536 to 131072 … upload", DataError):
        dataset.tokens[0:40000]


def test_other_files_at_the_url_replace_those_of_the_cache(pair, tmp_path):
    _, url = pair
    IndexedDataset(local_pair(url, tmp_path / "cache")).tokens.verify()
    write_pair(tmp_path / "new", first=7)
    put(tmp_path / "new", url)
    there, new = (
        IndexedDataset(local_pair(url, tmp_path / "cache")),
        IndexedDataset(tmp_path / "new"),
    )
    assert (there[3] == new[3]).all()


def test_a_pair_whose_upload_failed_does_not_count_and_stays_here(pair, tmp_path, monkeypatch):
    prefix, url = pair
    names = sorted(file.name for file in tmp_path.iterdir())

    def fail_after_the_tokens(file, target):
        if file.suffix != ".bin":
            raise OSError(110, "cut")
        upload(file, target)

    monkeypatch.setattr(remote_files, "upload", fail_after_the_tokens)
    with problem("upload … cut … local files", DataError):
        upload_pair(prefix, url)
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    with problem("corpus.idx … missing", WrongDataError):
        local_pair(url, tmp_path / "cache")


def _read_all(url, cache, digest):
    import xxhash

    dataset = IndexedDataset(local_pair(url, cache))
    tokens = b"".join(dataset[i].tobytes() for i in range(len(dataset)))
    assert xxhash.xxh3_64_hexdigest(tokens) == digest


def test_processes_share_a_cache(pair, tmp_path):
    import xxhash

    prefix, url = pair
    digest = xxhash.xxh3_64_hexdigest(Path(f"{prefix}.bin").read_bytes())
    arguments = (url, tmp_path / "cache", digest)
    ranks = [get_context("fork").Process(target=_read_all, args=arguments) for _ in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0, 0]


def test_a_missing_pair_is_named(store, tmp_path):
    with problem(f"{BUCKET}/none.bin … missing … suffix", WrongDataError):
        local_pair(f"{BUCKET}/none", tmp_path)


def test_merging_reads_urls_and_uploads_the_index_last(pair, tmp_path):
    prefix, url = pair
    write_pair(tmp_path / "second", documents=3, first=5)
    local = local_pair(url, tmp_path / "cache")
    merge([local, str(tmp_path / "second")], str(tmp_path / "both"))
    expected = Path(tmp_path / "both.bin").read_bytes()
    write_text(f"{url}_both.tokenizer.json", "of an older pair")
    upload_pair(str(tmp_path / "both"), f"{url}_both")
    assert not list(tmp_path.glob("both*"))
    assert not exists(f"{url}_both.tokenizer.json")
    there = IndexedDataset(local_pair(f"{url}_both", tmp_path / "cache"))
    there.tokens.verify()
    assert there.bin_path.read_bytes() == expected
