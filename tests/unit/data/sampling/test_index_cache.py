"""The sample index on disk: found again, built again when damaged, never half there."""

import json
import logging
import os

import numpy as np
import pytest
from problems import problem

from megatron.common.errors import DataError
from megatron.data.datasets.gpt_dataset import GPTDataset
from megatron.data.sampling import index_cache
from megatron.data.sampling.index_cache import cached_sample_index, cached_sizes
from megatron.data.sampling.index_map import BLOCK_ROWS, IndexMapFile, digests_of
from megatron.data.sampling.sample_index import plan_epochs
from megatron.data.token_files.index_files import IndexContent, counting, write_legacy_index
from megatron.data.token_files.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetWriter,
    open_token_files,
)

SIZES = [5, 3, 9, 1, 20, 7]


def corpus(prefix, sizes=SIZES):
    with IndexedDatasetWriter(prefix, "u2") as writer:
        writer.append(np.arange(sum(sizes)), sizes)
    return IndexedDataset(prefix)


def cached(dataset, documents=range(6), *, num_samples=9, seq_length=4, seed=1, directory=None):
    tokens = int(dataset.sizes[documents.start : documents.stop].sum())
    epochs = plan_epochs(tokens, num_samples=num_samples, seq_length=seq_length)
    return cached_sample_index(
        dataset, documents, epochs, seq_length=seq_length, seed=seed, directory=directory
    )


def as_lists(index):
    return [
        index.document_order[:].tolist(),
        index.sample_starts[:].tolist(),
        index.sample_order[:].tolist(),
    ]


@pytest.fixture
def builds(monkeypatch):
    """Count how often an index is built."""
    calls = []

    def build(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    original = index_cache.build_sample_index
    monkeypatch.setattr(index_cache, "build_sample_index", build)
    return calls


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home directory of the test's own."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_an_index_is_built_once_and_stands_beside_the_data(tmp_path, builds):
    dataset = corpus(tmp_path / "c")
    first, second = cached(dataset), cached(dataset)
    assert as_lists(first) == as_lists(second)
    assert len(builds) == 1
    names = {path.name.partition("-")[2] for path in (tmp_path / "c-index-cache").iterdir()}
    maps = ("document_order", "sample_order", "sample_starts")
    assert names == {f"{name}.{end}" for name in maps for end in ("npy", "xxh3")} | {"sizes.json"}


@pytest.mark.parametrize(
    "other",
    [
        {"documents": range(5)},
        {"documents": range(1, 6)},
        {"num_samples": 20},
        {"seq_length": 5},
        {"seed": 2},
    ],
)
def test_other_options_give_another_index(tmp_path, builds, other):
    dataset = corpus(tmp_path / "c")
    cached(dataset)
    cached(dataset, **other)
    assert len(builds) == 2


def test_another_corpus_of_the_same_size_under_the_same_name_gives_another_index(tmp_path, builds):
    cached(corpus(tmp_path / "c"))
    cached(corpus(tmp_path / "c", [3, 5, 9, 1, 20, 7]))
    assert len(builds) == 2


def test_a_corpus_copied_elsewhere_keeps_its_index(tmp_path, builds):
    cached(corpus(tmp_path / "a"), directory=tmp_path / "cache")
    cached(corpus(tmp_path / "b"), directory=tmp_path / "cache")
    assert len(builds) == 1


@pytest.mark.parametrize("name", ["document_order", "sample_starts", "sample_order"])
@pytest.mark.parametrize("end", ["npy", "xxh3"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "another shape", "missing", "FIFO"])
def test_a_damaged_file_is_built_again(tmp_path, builds, caplog, name, end, damage):
    dataset = corpus(tmp_path / "c")
    expected = as_lists(cached(dataset))
    (path,) = (tmp_path / "c-index-cache").glob(f"*-{name}.{end}")
    if damage == "missing":
        path.unlink()
    elif damage == "FIFO":
        path.unlink()
        os.mkfifo(path)
    elif damage == "another shape":
        with path.open("wb") as file:
            np.save(file, np.arange(3))
    else:
        path.write_bytes(path.read_bytes()[:-1] if damage == "truncated" else b"")
    assert as_lists(cached(dataset)) == expected
    assert len(builds) == 2
    assert ("it is built again" in caplog.text) == (damage != "missing")
    assert as_lists(cached(dataset)) == expected
    assert len(builds) == 2


@pytest.mark.parametrize("name", ["document_order", "sample_starts", "sample_order"])
@pytest.mark.parametrize("end", ["npy", "xxh3"])
def test_damage_inside_a_map_is_reported_when_it_is_read_and_mended_by_the_next_start(
    tmp_path, builds, name, end
):
    """One bit: the documents have equal lengths, so that the tokens would be others and no more."""
    dataset = corpus(tmp_path / "c", [5] * 8)
    expected = as_lists(cached(dataset, range(8)))
    (path,) = (tmp_path / "c-index-cache").glob(f"*-{name}.{end}")
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(content)
    damaged = cached(dataset, range(8))
    with problem(f"-{name}.npy … rows 0 to … builds it again", DataError):
        as_lists(damaged)
    assert as_lists(cached(dataset, range(8))) == expected
    assert len(builds) == 2


def test_only_the_blocks_that_are_read_are_checked(tmp_path):
    values = np.arange(3 * BLOCK_ROWS + 5).reshape(-1, 1)
    digests = digests_of(values)
    values[2 * BLOCK_ROWS] += 1
    path = tmp_path / "map.npy"
    path.write_bytes(b"header" + values.tobytes())
    checked = IndexMapFile(path, digests, dtype=values.dtype, shape=values.shape, offset=6)
    assert len(checked) == len(values)
    assert checked[2 * BLOCK_ROWS - 1] == 2 * BLOCK_ROWS - 1
    assert checked[3 * BLOCK_ROWS :].ravel().tolist() == list(range(len(values)))[-5:]
    assert checked[:0].tolist() == checked[len(checked) :].tolist() == []
    empty = IndexMapFile(path, digests[:0], dtype=values.dtype, shape=(0,), offset=6)
    assert empty[:].tolist() == []
    for position in (-1, len(checked)):
        with pytest.raises(IndexError):
            checked[position]
    for positions in (3 * BLOCK_ROWS - 1, slice(2 * BLOCK_ROWS - 1, 2 * BLOCK_ROWS + 1)):
        with problem(f"map.npy … {2 * BLOCK_ROWS} to {3 * BLOCK_ROWS}", DataError):
            checked[positions]
    assert not path.exists()


@pytest.mark.parametrize("name", ["document_order", "sample_starts", "sample_order"])
def test_an_index_map_that_is_cut_under_the_reader_is_an_error(tmp_path, builds, name):
    """Reading a mapped file there would end the process with SIGBUS."""
    corpus(tmp_path / "c", [5] * 8)
    documents = {"num_samples": 9, "seq_length": 4, "seed": 1}
    samples = GPTDataset(IndexedDataset(tmp_path / "c"), range(8), **documents)
    expected = [sample["tokens"].tolist() for sample in samples]
    (path,) = (tmp_path / "c-index-cache").glob(f"*-{name}.npy")
    os.truncate(path, 128)
    with problem(f"-{name}.npy … truncated … builds it again", DataError):
        list(samples)
    again = GPTDataset(IndexedDataset(tmp_path / "c"), range(8), **documents)
    assert [sample["tokens"].tolist() for sample in again] == expected
    assert len(builds) == 2


def test_a_damaged_token_index_is_not_used(tmp_path):
    dataset = corpus(tmp_path / "c")
    pointers = dataset.pointers.copy()
    pointers[2] += 2
    dataset.pointers = pointers
    with problem("sequence 2 … size 9", DataError):
        cached(dataset)


def flipped(path, offset):
    """Flip a bit of the byte at `offset`; length, date and inode of the file stay as they are."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 2]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


# Offsets of the index of 6 sequences: sizes at 34, pointers at 58, starts of documents at 106.
@pytest.mark.parametrize("dataset_impl", ["mmap", "cached"])
@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (34 + 4, "sequence … size"),
        (58 + 8, "sequence … size"),
        (58 + 8 + 7, "sequence … size"),
        (106 + 8, "documents … 0 to 6"),
    ],
)
def test_a_token_index_that_is_damaged_later_is_refused_with_a_warm_cache(
    tmp_path, dataset_impl, offset, message
):
    corpus(tmp_path / "c")
    if dataset_impl == "cached":
        content = IndexContent(
            dtype=np.dtype("<u2"),
            num_sequences=6,
            num_documents=6,
            sizes=lambda: iter([np.array(SIZES)]),
            document_starts=lambda: counting(7),
        )
        with (tmp_path / "c.idx").open("wb") as file:
            write_legacy_index(file, content)
        # A size, the start of a sequence, its highest byte, and the start of a document.
        offset = {38: 168 + 8, 66: 112 + 8, 73: 112 + 15, 114: 216 + 8}[offset]
    cached(open_token_files(tmp_path / "c"))
    flipped(tmp_path / "c.idx", offset)
    for _ in range(2):  # nothing of the damaged file is kept
        with problem(f"c.idx … {message}", DataError):
            cached(open_token_files(tmp_path / "c"))
    flipped(tmp_path / "c.idx", offset)
    cached(open_token_files(tmp_path / "c"))


def test_a_sound_index_is_not_verified_again(tmp_path, builds, monkeypatch):
    first = as_lists(cached(corpus(tmp_path / "c")))
    monkeypatch.setattr(IndexedDataset, "verify", None)
    assert as_lists(cached(IndexedDataset(tmp_path / "c"))) == first
    assert len(builds) == 1


def test_the_home_directory_serves_where_the_data_cannot_be_written(tmp_path, builds, home):
    dataset = corpus(tmp_path / "c")
    (tmp_path / "c-index-cache").write_text("a file, where a directory cannot be made")
    assert as_lists(cached(dataset)) == as_lists(cached(dataset))
    assert len(builds) == 1
    assert len(list((home / ".cache" / "megatron" / "index-cache").glob("*.npy"))) == 3


def test_without_any_folder_the_index_stays_in_memory_and_this_is_reported(
    tmp_path, builds, home, caplog
):
    dataset = corpus(tmp_path / "c")
    home.write_text("")
    (tmp_path / "c-index-cache").write_text("")
    with caplog.at_level(logging.WARNING):
        assert as_lists(cached(dataset)) == as_lists(cached(dataset))
    assert len(builds) == 2
    assert "cannot write the index cache" in caplog.text
    assert "stay in memory" in caplog.text


def test_a_chosen_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "cache").write_text("")
    with problem(f"index cache … {tmp_path}/cache", DataError):
        cached(corpus(tmp_path / "c"), directory=tmp_path / "cache")


def test_a_write_that_fails_leaves_no_file(tmp_path, home, monkeypatch):
    def fail(file, arr, allow_pickle):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", fail)
    with problem("No space left on device", DataError):
        cached(corpus(tmp_path / "c"), directory=tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".json"]


def test_sizes_are_read_again_when_the_file_changes(tmp_path):
    dataset = corpus(tmp_path / "c")
    first = cached_sizes(dataset, range(1, 6))
    assert first.num_tokens == sum(SIZES[1:])
    dataset.sizes = None  # not looked at again
    assert cached_sizes(dataset, range(1, 6)) == first
    changed = corpus(tmp_path / "c", [5, 4, 9, 1, 20, 7])
    assert cached_sizes(changed, range(1, 6)).num_tokens == sum(SIZES[1:]) + 1


def test_a_sequence_too_long_for_index_maps_is_refused(tmp_path):
    sizes = np.array([5, 3_000_000_000])
    content = IndexContent(
        dtype=np.dtype("u1"),
        num_sequences=2,
        num_documents=2,
        sizes=lambda: iter([sizes]),
        document_starts=lambda: iter([np.arange(3)]),
    )
    with (tmp_path / "c.idx").open("wb") as file:
        write_legacy_index(file, content)
    with (tmp_path / "c.bin").open("wb") as file:
        file.truncate(sizes.sum())
    dataset = open_token_files(tmp_path / "c")
    dataset.verify()
    with problem("c.idx … 3000000000 tokens … index maps", DataError):
        GPTDataset(dataset, range(2), num_samples=1, seq_length=4, seed=1)
    assert cached_sizes(dataset, range(1)).num_tokens == 5


@pytest.mark.parametrize(
    "damage", ["cut", "another number", "another digest", "another shape", "FIFO"]
)
def test_a_damaged_record_of_sizes_is_made_again(tmp_path, damage):
    dataset = corpus(tmp_path / "c")
    first = cached_sizes(dataset, range(6))
    (record,) = (tmp_path / "c-index-cache").glob("*-sizes.json")
    written = record.read_text()
    content = json.loads(written)
    changed = {
        "cut": "{",
        "another number": json.dumps({**content, "num_tokens": 44}),
        "another digest": json.dumps({**content, "digest": "0" * 32}),
        "another shape": "[45]",
        "FIFO": "",
    }[damage]
    record.unlink()
    record.write_text(changed) if changed else os.mkfifo(record)
    assert cached_sizes(dataset, range(6)) == first
    assert record.read_text() == written
