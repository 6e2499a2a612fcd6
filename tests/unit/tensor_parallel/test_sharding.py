"""Marks of shards, exact division, and seeds of streams."""

import pytest
import torch
from problems import problem
from tiny import Shards
from torch import nn

from megatron.tensor_parallel.embedding import VocabParallelEmbedding
from megatron.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron.tensor_parallel.rng import stream_seed
from megatron.tensor_parallel.sharding import Shard, exact_quotient, mark_sharded, shard_of


def test_a_marked_parameter_says_which_piece_it_is():
    parameter = mark_sharded(nn.Parameter(torch.zeros(2)), 1, Shards(2, 4))
    assert shard_of(parameter) == Shard(dim=1, index=2, count=4)
    assert parameter.tensor_model_parallel is True


def test_an_unmarked_parameter_is_whole():
    assert shard_of(nn.Parameter(torch.zeros(2))) is None


def test_sizes_divide_exactly():
    assert exact_quotient(12, 4, "heads") == 3
    with problem("heads 10 … 4", ValueError):
        exact_quotient(10, 4, "heads")


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda group: ColumnParallelLinear(4, 6, group=group), "out_features 6"),
        (lambda group: RowParallelLinear(6, 4, group=group), "in_features 6"),
        (lambda group: VocabParallelEmbedding(6, 4, group=group), "num_embeddings 6"),
    ],
)
def test_a_layer_that_does_not_divide_is_refused(build, name):
    with problem(f"{name} … 4", ValueError):
        build(Shards(0, 4))


def test_seeds_of_all_ranks_of_a_large_run_differ():
    # Tensor-parallel streams stand 2718 above, one per rank (DeepSpeed's choice).
    seeds = [
        stream_seed(1234, stage=stage, part=data) + offset
        for stage in range(16)
        for data in range(64)
        for offset in (0, *(2718 + tensor for tensor in range(8)))
    ]
    assert len(set(seeds)) == len(seeds)


def test_seeds_do_not_depend_on_the_layout():
    assert stream_seed(1234, stage=0, part=0) == 1234
    assert stream_seed(1234, stage=3, part=0) == 1534
