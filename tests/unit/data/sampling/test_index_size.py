"""Index maps that cannot fit are refused before they take memory; those that fit are not."""

import tracemalloc

import numpy as np
import pytest
from problems import problem

from megatron.common.errors import DataError
from megatron.data.datasets.gpt_dataset import GPTDataset
from megatron.data.datasets.packed_dataset import MTFDataset, pack
from megatron.data.sampling import index_size as room
from megatron.data.sampling.blending import BlendedDataset, blend_order
from megatron.data.sampling.index_size import blend_room, packing_room, sample_index_room
from megatron.data.sampling.sample_index import build_sample_index, plan_epochs
from megatron.data.token_files.indexed_dataset import IndexedDataset, IndexedDatasetWriter

GB = 10**9


@pytest.fixture
def corpus(tmp_path):
    """40 000 tokens in 100 documents."""
    with IndexedDatasetWriter(tmp_path / "c", "u2") as writer:
        writer.append(np.zeros(40_000, np.uint16), [400] * 100)
    return IndexedDataset(tmp_path / "c")


def dataset(corpus, num_samples, **more):
    return GPTDataset(corpus, range(100), num_samples=num_samples, seq_length=128, seed=1, **more)


def test_more_iterations_than_any_memory_holds_are_refused_at_once(corpus, free_memory):
    free_memory(64 * GB)
    message = "17179869374 samples … 54975582 epochs … /c … 43 … 64.0 GB … --train-iters"
    with problem(message, DataError):
        dataset(corpus, 2**31 * 8)
    assert not list(corpus.bin_path.parent.glob("c-index-cache/*.npy"))


def test_a_blend_and_a_packing_that_no_memory_holds_are_refused(corpus, free_memory):
    free_memory(64 * GB)
    with problem("17179869184 samples … blend of 2 … 171.8 GB", DataError):
        BlendedDataset(
            [range(10**11)] * 2,
            [1, 1],
            num_samples=2**34,
            num_needed=[2**33] * 2,
            prefix=corpus.prefix,
        )
    with problem("17179869184 samples … /c … 962.1 GB", DataError):
        MTFDataset(corpus, corpus, range(100), num_samples=2**34, seq_length=800, seed=1)


def test_maps_that_are_there_are_read_whatever_memory_is_left(corpus, free_memory):
    built = dataset(corpus, 300)
    free_memory(1)
    again = dataset(IndexedDataset(corpus.prefix), 300)
    assert again.index.sample_order[:].tolist() == built.index.sample_order[:].tolist()
    with problem("/c … GB … memory … --train-iters", DataError):
        dataset(corpus, 3000)


def test_a_cache_without_room_is_refused_before_anything_is_built(corpus, tmp_path, disk):
    disk(free=10, block=1)
    chosen = tmp_path / "not" / "there"
    with problem(f"--data-cache-path: {chosen} … 0.0 GB", DataError):
        dataset(corpus, 300, cache_directory=chosen)
    assert not list(chosen.glob("*.npy"))
    disk(
        free=10, total=0, block=1
    )  # of a file system that has no size, it is writing that says what is wrong
    assert room.lack_of_disk(room.MapRoom(10**9, 10**9, "c"), chosen) == ""
    disk(free=10, block=1)
    assert len(dataset(corpus, 300)) >= 300  # in free_memory, and a line says so
    assert not list(tmp_path.glob("c-index-cache/*.npy"))


def peak_of(build):
    """Return what `build` returns, and the most memory it had at a time."""
    tracemalloc.start()
    try:
        result = build()
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def num_bytes(maps):
    return sum(each.nbytes for each in vars(maps).values())


@pytest.mark.parametrize(
    ("documents", "mean", "num_samples"),
    [(200_000, 20, 1), (1000, 200, 500_000), (300_000, 3, 200_000)],
)
def test_what_a_sample_index_needs_is_what_is_planned_or_a_little_more(
    documents, mean, num_samples
):
    sizes = np.full(documents, mean, np.int32)
    epochs = plan_epochs(documents * mean, num_samples=num_samples, seq_length=64)
    needed = sample_index_room("c", documents, epochs, last_document=documents)
    maps, peak = peak_of(
        lambda: build_sample_index(sizes, range(documents), epochs, seq_length=64, seed=1)
    )
    assert needed.disk_bytes == num_bytes(maps)
    assert needed.memory_bytes <= peak < 2 * needed.memory_bytes + (20 << 20)


def test_what_a_blend_and_a_packing_need_is_at_least_what_is_planned():
    order, peak = peak_of(lambda: blend_order([1, 2, 3], 300_000))
    needed = blend_room(3, 300_000)
    assert needed.disk_bytes == num_bytes(order)
    assert needed.memory_bytes <= peak
    lengths = np.full(1000, 60)
    rows, peak = peak_of(lambda: pack(lengths, range(1000), num_rows=5000, row_length=65, seed=1))
    needed = packing_room("c", "pair", 5000)
    assert needed.disk_bytes <= num_bytes(rows)
    assert needed.memory_bytes <= peak
