"""An architecture of transformers from outside of megatron: Starcoder2, rotary with biases everywhere.

`--plugin examples/hugging_face_family/starcoder2.py` lets to_hf.py write it, where no other architecture
expresses a network, and from_hf.py read it; see docs/extending.md.
"""

from typing import Any

from megatron.api import FAMILIES
from megatron.checkpointing.expressed import Allowed
from megatron.checkpointing.hugging_face.families.family import (
    Family,
    HuggingFaceConfig,
    Modules,
    activation_name,
    activation_values,
)
from megatron.checkpointing.hugging_face.families.rotary import rotary_values
from megatron.checkpointing.hugging_face.families.tensor_mapping import QueriesKeysValues
from megatron.config.network.model_spec import ModelSpec


def needs(_: ModelSpec) -> Allowed:
    """Return the values of fields that differ from those of a plain GPT."""
    return {
        "position_embedding": ("rotary",),
        "num_query_groups": None,
        "activation": ("gelu_tanh",),
    }


def values_of(config: HuggingFaceConfig) -> dict[str, Any]:
    """Return the settings of what is no field of ModelSpec."""
    return {
        **rotary_values(config),
        **activation_values(config["hidden_act"], gated=False),
        "group_query_attention": True,
        "num_query_groups": config["num_key_value_heads"],
    }


def qkv(spec: ModelSpec) -> QueriesKeysValues:
    """Return how our one matrix holds queries, keys and values."""
    queries = spec.attention.num_attention_heads // spec.attention.num_query_groups
    return QueriesKeysValues(
        groups=spec.attention.num_query_groups, queries=queries, head_dim=spec.attention.head_dim
    )


STARCODER2 = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    keys={
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "intermediate_size": "ffn_hidden_size",
        "num_attention_heads": "num_attention_heads",
        "num_key_value_heads": lambda spec: spec.attention.num_query_groups,
        "max_position_embeddings": "max_position_embeddings",
        "rope_theta": lambda spec: spec.positions.rotary_base,
        "hidden_act": lambda spec: {"gelu_new": "gelu_pytorch_tanh"}[activation_name(spec)],
        "norm_epsilon": "norm_epsilon",
        "attention_dropout": "attention_dropout",
        "residual_dropout": "hidden_dropout",
        "embedding_dropout": lambda spec: spec.hidden_dropout,
        "use_bias": True,
        "sliding_window": lambda _: None,
    },
    values_of=values_of,
    needs=needs,
    network={
        "embedding.word_embeddings": "model.embed_tokens",
        "final_layernorm": "model.norm",
        "output_layer": "lm_head",
    },
    layer={
        "input_layernorm": "input_layernorm",
        "self_attention.query_key_value": Modules(
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), qkv
        ),
        "self_attention.dense": "self_attn.o_proj",
        "post_attention_layernorm": "post_attention_layernorm",
        "mlp.dense_h_to_4h": "mlp.c_fc",
        "mlp.dense_4h_to_h": "mlp.c_proj",
    },
    layers="model.layers.{}.",
)


@FAMILIES.register("starcoder2")
def families() -> list[Family]:
    """Return the architectures that this module adds."""
    return [STARCODER2]
