"""What DeepSpeed looks at by itself: names of classes, functions and attributes."""

import re
from types import SimpleNamespace

import pytest
import torch
from networks import gpt_steps
from problems import problem
from tiny import Shards, tiny_spec

from megatron.engine.pipeline_module import _require_whole_ties, _require_work
from megatron.model.layers.layer_list import Block, Layer
from megatron.tensor_parallel.rng import OrdinaryStream


def steps(**changes):
    return gpt_steps(tiny_spec(**changes), group=Shards(0, 1), rng=OrdinaryStream(), mixed=True)


def test_the_recomputed_layer_has_the_name_that_deepspeed_looks_for():
    blocks = {s.cls.__name__ for s in steps() if isinstance(s, Layer) and issubclass(s.cls, Block)}
    assert blocks == {"ParallelTransformerLayerPipe"}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("transformer", ["ParallelTransformerLayerPipe"] * 2),
        (
            "transformer|embedding",
            ["EmbeddingPipe", *["ParallelTransformerLayerPipe"] * 2, "OutputEmbeddingPipe"],
        ),
        ("mlp", []),
    ],
)
def test_partition_patterns_match_layers_and_no_function(pattern, expected):
    names = [s.cls.__name__ if isinstance(s, Layer) else s.__name__ for s in steps()]
    assert [name for name in names if re.search(pattern, name, re.IGNORECASE)] == expected


def test_the_path_of_the_tied_weight_leads_to_it_in_every_tied_layer():
    tied = [step for step in steps() if isinstance(step, Layer) and step.tie]
    assert len(tied) == 2
    for step in tied:
        weight = step.cls(**step.kwargs)
        for name in step.tie.weight.split("."):
            weight = getattr(weight, name)
        assert weight.shape == (12, 8)
        assert weight.tensor_model_parallel is True


def test_a_weight_beside_a_tied_one_is_refused_where_it_would_be_a_copy():
    stage = SimpleNamespace(
        tied_modules={"embed": torch.nn.Linear(2, 2)},
        tied_comms={"embed": {"ranks": [0, 2]}},
        tied_weight_attrs={"embed": ["weight"]},
        global_rank=0,
        stage_id=1,
    )
    _require_whole_ties(stage)
    stage.global_rank = 2
    with problem("Linear on stage 1 … embed … bias", ValueError):
        _require_whole_ties(stage)


def test_every_stage_with_a_transformer_layer_is_accepted():
    _require_work(steps(), [0, 4, 9], 2, "type:transformer")


def test_embeddings_are_enough_for_a_stage():
    _require_work(steps(), [0, 3, 5, 9], 3, "type:transformer|embedding")


@pytest.mark.parametrize(
    ("bounds", "output"),
    [
        ([0, 1, 9], "type:x … stage 0 (entries 0 to 0) … type:transformer"),
        ([0, 6, 9], "type:x … stage 1 (entries 6 to 8) … type:transformer"),
        ([0, 4, 4, 9], "type:x … stage 1 … type:transformer"),
    ],
)
def test_a_stage_without_weights_or_behind_the_norm_is_refused(bounds, output):
    with problem(output):
        _require_work(steps(), bounds, len(bounds) - 1, "type:x")
