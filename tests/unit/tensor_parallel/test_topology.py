"""Which rank stands where, against DeepSpeed's topology."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from megatron.tensor_parallel.topology import Topology

SHAPES = [(1, 1, 1), (2, 1, 1), (1, 3, 1), (1, 1, 4), (2, 2, 2), (4, 3, 2), (3, 1, 8), (12, 8, 4)]


@pytest.fixture(params=SHAPES, ids=str)
def pair(request):
    pipeline, data, tensor = request.param
    ours = Topology(pipeline=pipeline, data=data, tensor=tensor)
    return ours, PipeModelDataParallelTopology(num_pp=pipeline, num_dp=data, num_mp=tensor)


def test_every_rank_has_deepspeed_s_coordinates(pair):
    ours, theirs = pair
    for rank in range(theirs.world_size()):
        place = theirs.get_coord(rank)
        assert (ours.stage_of(rank), ours.data_rank_of(rank), ours.tensor_rank_of(rank)) == (
            place.pipe,
            place.data,
            place.model,
        )
        assert ours.rank(pipeline=place.pipe, data=place.data, tensor=place.model) == rank


def test_groups_are_deepspeed_s_lists(pair):
    ours, theirs = pair
    for groups, axis in (
        (ours.tensor_groups(), "model"),
        (ours.data_groups(), "data"),
    ):
        expected = theirs.get_axis_comm_lists(axis)
        if not expected:  # DeepSpeed leaves an axis of size 1 out
            expected = [[rank] for rank in range(theirs.world_size())]
        assert sorted(groups) == sorted(expected), axis


def test_a_replica_is_all_stages_and_shards_of_one_data_rank(pair):
    ours, theirs = pair
    expected = [sorted(theirs.filter_match(data=d)) for d in range(ours.data)]
    assert ours.model_groups() == expected


def test_tensor_neighbours_are_adjacent_ranks():
    assert Topology(pipeline=2, data=2, tensor=2).tensor_groups()[:2] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("sizes", "per_expert", "expert", "copies"),
    [
        # Experts are divided over the tensor-parallel ranks too.
        ({"tensor": 2, "expert": 2}, [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 4], [1, 5]]),
        # Not divided, over replicas and tensor-parallel ranks, or the latter alone.
        (
            {"tensor": 2, "expert": 4, "expert_tensor": 1},
            [[0], [1]],
            [[0, 1, 2, 3], [4, 5, 6, 7]],
            [[0, 4], [1, 5]],
        ),
        (
            {"tensor": 2, "expert": 2, "expert_tensor": 1},
            [[0], [1]],
            [[0, 1], [2, 3]],
            [[0, 2, 4, 6]],
        ),
        ({"tensor": 2, "expert_tensor": 1}, [[0], [1]], [[0], [1]], [[*range(8)]]),
        # Over some of the tensor-parallel ranks, and over more.
        (
            {"tensor": 4, "expert": 2, "expert_tensor": 2},
            [[0, 1], [2, 3]],
            [[0, 2], [1, 3]],
            [[0, 4], [1, 5]],
        ),
        ({"tensor": 2, "expert_tensor": 4}, [[0, 1, 2, 3]], [[0], [1]], [[0, 4], [1, 5]]),
    ],
)
def test_groups_of_experts_are_neighbours_as_in_megatron_lm(sizes, per_expert, expert, copies):
    topology = Topology(pipeline=2, data=8 // sizes["tensor"], **sizes)
    for groups, expected in (
        (topology.expert_tensor_groups(), per_expert),
        (topology.expert_groups(), expert),
        (topology.expert_data_groups(), copies),
    ):
        assert groups[: len(expected)] == expected
        assert sorted(rank for group in groups for rank in group) == [*range(16)]


def test_ranks_that_divide_a_sequence_stand_beside_those_that_share_layers():
    topology = Topology(pipeline=2, data=2, sequence=2, tensor=2)
    assert topology.sequence_groups()[:3] == [[0, 2], [1, 3], [4, 6]]
    assert topology.tensor_groups()[:2] == [[0, 1], [2, 3]]
    assert topology.data_groups()[:2] == [[0, 4], [1, 5]]
    assert topology.data_and_sequence_groups() == [
        [0, 2, 4, 6],
        [1, 3, 5, 7],
        [8, 10, 12, 14],
        [9, 11, 13, 15],
    ]
    assert topology.model_groups()[0] == [0, 1, 8, 9]
    for rank in range(16):
        place = {
            "pipeline": topology.stage_of(rank),
            "data": topology.data_rank_of(rank),
            "sequence": topology.sequence_rank_of(rank),
            "tensor": topology.tensor_rank_of(rank),
        }
        assert topology.rank(**place) == rank
