"""What ranks have in common."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.training.guards.replica_check import differences, fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_one_changed_bit_anywhere_changes_the_fingerprint(dtype):
    tensor = (torch.arange(24) % 7).to(dtype).view(4, 6)
    before = fingerprint(tensor)
    assert fingerprint(tensor.clone()) == before
    for place in range(24):
        for bit in range(8):
            other = tensor.clone()
            other.view(-1).view(torch.uint8)[place * tensor.element_size()] ^= 1 << bit
            assert fingerprint(other) != before


@given(places=st.lists(st.integers(0, 9), min_size=2, max_size=2, unique=True))
def test_the_order_of_elements_counts(places):
    tensor = torch.arange(10.0)
    other = tensor.clone()
    other[places] = tensor[places[::-1]]
    assert fingerprint(other) != fingerprint(tensor)


def test_parts_of_a_tensor_are_read_as_they_lie():
    tensor = torch.arange(12.0).view(3, 4)
    assert fingerprint(tensor.t()) == fingerprint(tensor.t().contiguous())
    assert fingerprint(torch.zeros(0)) == 0


def test_only_what_is_in_common_is_compared():
    weight, shard = ("norm.weight", "all"), ("dense.weight", 0)
    same = [(rank, weight, 7) for rank in range(4)]
    assert list(differences(same)) == []
    assert list(differences([(0, shard, 1), (1, ("dense.weight", 1), 2)])) == []
    prints = [*same[:3], (3, weight, 8), (0, shard, 1), (2, shard, 2)]
    assert list(differences(prints)) == [
        "norm.weight: ranks 0, 1, 2 | 3",
        "dense.weight: ranks 0 | 2",
    ]
