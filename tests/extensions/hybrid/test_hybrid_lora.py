"""Adapters of hybrid networks: which layers get them, merged into weights, and for PEFT."""

import pytest
from adapters import ALL, exported, require_logits_of_the_run
from checkpoints import spread_network
from test_hybrid import of_pattern

from megatron.tensor_parallel.linear import is_adapter

COMMON = """
    --hidden-size 24 --num-attention-heads 6 --num-layers 4 --seq-length 10
    --max-position-embeddings 64 --attention-dropout 0 --hidden-dropout 0
    --tokenizer-type NullTokenizer --vocab-size 10 --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights
"""
NETWORKS = {
    "nemotron_h": """--hybrid-layer-pattern M*-M --position-embedding-type none --squared-relu
        --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 4""",
    "qwen3_next": """--hybrid-layer-pattern G-*- --position-embedding-type rotary --swiglu
        --attention-output-gate --qk-layernorm --apply-layernorm-1p --linear-num-key-heads 2
        --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 6""",
}


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ((), "3.mixer.in_proj 4.mixer.in_proj 5.self_attention.query_key_value"),
        (
            ("--lora-target-modules", "dense", "dense_4h_to_h"),
            "3.mixer.out_proj 4.mixer.out_proj 5.self_attention.dense 6.mlp.dense_4h_to_h",
        ),
    ],
)
def test_projections_of_mixers_get_the_adapters_of_attentions(group, flags, layers):
    model = spread_network(of_pattern("MG*-", "--lora-rank", "2", *flags), group)
    names = filter(is_adapter, dict(model.named_parameters()))
    assert sorted({name.rpartition(".")[0] for name in names}) == layers.split()


@pytest.mark.parametrize("model_type", NETWORKS)
def test_adapters_are_exported(group, tmp_path, model_type):
    flags = [*COMMON.split(), *NETWORKS[model_type].split()]
    require_logits_of_the_run(*exported(group, tmp_path, model_type, flags, f"{ALL} all-linear"))
