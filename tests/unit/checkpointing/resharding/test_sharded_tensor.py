"""Whole tensors in pieces: every shard of every other division is what torch would cut."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peak_memory import PeakMemory
from problems import problem

from megatron.checkpointing.resharding.sharded_tensor import (
    FlatShard,
    ParameterState,
    ShardedTensor,
    fill_from,
)
from megatron.tensor_parallel.sharding import Shard


def divided(tensor, dim, count, cuts):
    """Return `tensor` as `count` shards along `dim`, each cut at `cuts` and padded at the end."""
    shards = tensor.chunk(count, dim) if dim is not None else [tensor]
    pieces = []
    for shard in shards:
        flat = torch.cat([shard.reshape(-1), torch.full((3,), -1.0)])
        places = sorted({cut % (flat.numel() + 1) for cut in cuts})
        pieces.append(FlatShard(flat.tensor_split(places)))
    return ShardedTensor(shape=tuple(tensor.shape), dim=dim, shards=pieces, stored=tensor.shape[0])


DIVISIONS = st.sampled_from([(None, 1), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 4)])


@given(
    DIVISIONS, DIVISIONS, st.lists(st.integers(0, 99), max_size=4), st.integers(0, 23), st.data()
)
def test_any_part_of_any_shard_is_cut_from_any_division(was, becomes, cuts, start, data):
    tensor = torch.arange(6.0 * 8).view(6, 8)
    stored = divided(tensor, *was, cuts)
    assert torch.equal(stored.all(), tensor)
    assert torch.equal(stored.rows(2, 5), tensor[2:5])

    dim, count = becomes
    index = data.draw(st.integers(0, count - 1))
    expected = tensor.chunk(count, dim or 0)[index]
    start %= expected.numel()
    stop = data.draw(st.integers(start + 1, expected.numel()))
    found = torch.zeros(stop - start, dtype=torch.float64)
    shard = None if dim is None else Shard(dim, index, count)
    size = data.draw(st.sampled_from([1, 128, 8000]))
    fill_from(found, stored, shard, tuple(expected.shape), start, buffer_bytes=size)
    assert torch.equal(found.float(), expected.reshape(-1)[start:stop])


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("buffer_bytes", [1 << 14, 1 << 17])
def test_memory_is_bounded_by_the_buffer(dim, buffer_bytes):
    tensor = torch.arange(512.0 * 256).view(512, 256)
    # Two shards, each in pieces that end within rows: what ZeRO leaves of two tensor ranks.
    stored = divided(tensor, dim, 2, [10_001, 30_011])
    found = torch.zeros(tensor.numel() // 2)
    known = [found, *(piece for shard in stored.shards for piece in shard.tensors)]
    with PeakMemory(*known) as memory:
        fill_from(found, stored, Shard(1, 1, 2), (512, 128), buffer_bytes=buffer_bytes)
    assert torch.equal(found.view(512, 128), tensor[:, 128:])
    assert buffer_bytes / 2 < memory.peak <= buffer_bytes


@pytest.mark.parametrize("count", [1, 2])
def test_a_bias_is_divided_too(count):
    bias = torch.arange(6.0)
    stored = divided(bias, 0, count, [2])
    found = torch.zeros(3)
    fill_from(found, stored, Shard(0, 1, 2), (3,))
    assert found.tolist() == [3.0, 4.0, 5.0]


@pytest.mark.parametrize("copies", [False, True])
def test_further_rows_are_zeros_or_copies_of_the_last(copies):
    table = torch.arange(8.0).view(4, 2)
    stored = divided(table, 0, 2, [3])
    parameter = ParameterState(weight=stored, states={"exp_avg": stored}, steps=3.0)
    longer = parameter.with_rows(7, copies_last=copies)
    expected = torch.cat([table, copies * table[-1:].expand(3, 2)])
    for whole in longer.tensors.values():
        assert torch.equal(whole.all(), expected)
        assert torch.equal(whole.rows(5, 7), expected[5:])
    assert torch.equal(parameter.with_rows(3).weight.all(), table[:3])
    found = torch.zeros(6)
    six = parameter.with_rows(6, copies_last=copies)
    fill_from(found, six.weight, Shard(0, 1, 2), (3, 2))
    assert found.tolist() == [6.0, 7.0, *([6.0, 7.0] if copies else [0.0, 0.0]) * 2]


def test_other_shapes_are_refused():
    stored = divided(torch.zeros(4, 2), 0, 2, [])
    with problem("[4, 2] … [6, 2]", ValueError):
        fill_from(torch.zeros(6), stored, Shard(0, 0, 2), (3, 2))
    with problem("shard 1 … 3 … 4", ValueError):
        short = [FlatShard([torch.zeros(4)]), FlatShard([torch.zeros(3)])]
        ShardedTensor(shape=(4, 2), dim=0, shards=short, stored=4)
