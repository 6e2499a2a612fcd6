"""Counted parameters against those of the real module."""

import pytest
import torch
from networks import gpt_steps
from test_options import OPTIONS
from tiny import tiny_spec

from megatron.model.layers.layer_list import SequentialModel
from megatron.tensor_parallel.rng import OrdinaryStream


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_layers": 5, "ffn_hidden_size": 20, "head_dim": 7},
        {"max_position_embeddings": 9, "padded_vocab_size": 40},
        {"num_layers": 24, "hidden_size": 1024, "ffn_hidden_size": 4096, "head_dim": 512},
        *OPTIONS.values(),
    ],
    ids=str,
)
def test_the_count_is_that_of_the_module(group, changes):
    spec = tiny_spec(**changes)
    with torch.device("meta"):
        model = SequentialModel(gpt_steps(spec, group=group, rng=OrdinaryStream(), mixed=False))
    counts = {name: p.numel() for name, p in model.named_parameters()}
    assert spec.num_parameters == sum(counts.values())
    without = sum(count for name, count in counts.items() if "embed" not in name)
    assert spec.num_parameters_without_embeddings == without
