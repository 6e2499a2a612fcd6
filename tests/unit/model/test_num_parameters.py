"""Counted parameters against those of the real module."""

import pytest
import torch
from networks import gpt_steps, task_network
from test_options import OPTIONS
from tiny import LLAMA, ROTARY, tiny_plan, tiny_spec

from megatron.model.layers.layer_list import SequentialModel
from megatron.tensor_parallel.rng import OrdinaryStream

PREDICTIONS = [
    LLAMA | {"prediction_depths": 2, "prediction_loss_scale": 0.1},
    LLAMA | {"prediction_depths": 2, "prediction_repeated": True, "tied_embeddings": True},
    ROTARY | {"prediction_depths": 1, "num_experts": (1, 2), "experts_per_token": 1},
]
LATENT = {
    **{"position_embedding": "rotary", "rotary_dim": 2, "num_query_groups": 2},
    **{"kv_lora_rank": 7, "q_lora_rank": 5, "qk_pos_emb_head_dim": 2, "v_head_dim": 3},
    "latent_norm_epsilon": 1e-6,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_layers": 5, "ffn_hidden_size": 20, "head_dim": 7},
        {"max_position_embeddings": 9, "padded_vocab_size": 40},
        {"num_layers": 24, "hidden_size": 1024, "ffn_hidden_size": 4096, "head_dim": 512},
        *OPTIONS.values(),
        *PREDICTIONS,
        LATENT,
        LATENT | {"q_lora_rank": 0, "qkv_bias": False, "linear_bias": False},
        LATENT | {"normalization": "RMSNorm", "qk_layernorm": True, "num_layers": 3},
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


UNTIED = "--untie-embeddings-and-output-weights"


@pytest.mark.parametrize(
    "objective, flags",
    [
        ("gpt", []),
        ("gpt", [UNTIED]),
        ("bert", []),
        ("bert", ["--bert-no-binary-head"]),
        ("t5", ["--decoder-seq-length", "4"]),
        ("retro", ["--num-layers", "6", "--retro-chunk-length", "2"]),
        ("retro", ["--num-layers", "6", "--retro-chunk-length", "2", UNTIED]),
    ],
    ids=str,
)
def test_padding_is_what_the_module_has_beyond_the_vocabulary(group, objective, flags):
    plan = tiny_plan(*flags, "--pad-vocab-size-to", "996", objective=objective)
    with torch.device("meta"):
        model = task_network(plan, group, initialises=False)
    rows = [p.numel() // 996 for p in model.parameters() if len(p) == 996]
    spec = plan.model
    assert rows
    assert spec.num_padding_parameters == sum(rows) * (996 - spec.vocabulary.vocab_size)
