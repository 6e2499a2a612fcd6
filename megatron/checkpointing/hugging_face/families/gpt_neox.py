"""GPT-NeoX and Pythia: rotary positions of a share of each head, LayerNorm, parallel residuals."""

from operator import attrgetter

from megatron.checkpointing.expressed import Allowed
from megatron.checkpointing.hugging_face.families.family import (
    Family,
    HuggingFaceConfig,
    activation_name,
    activation_values,
    bias_values,
)
from megatron.checkpointing.hugging_face.families.rotary import (
    EXPRESSED,
    rope_scaling_config,
    rotary_values,
)
from megatron.config.network.model_spec import ModelSpec
from megatron.config.parsing.files import Values


def _needs(spec: ModelSpec) -> Allowed:
    return {
        **EXPRESSED,
        "position_embedding": ("rotary",),
        "attention_output_bias": None,
    }


def _values_of(config: HuggingFaceConfig) -> Values:
    return {
        **rotary_values(config),
        **activation_values(config["hidden_act"], gated=False),
        **bias_values(attention=config.get("attention_bias", True), mlp=True),
    }


def _rotary_share(spec: ModelSpec) -> float:
    return spec.positions.rotary_dim / spec.attention.head_dim


GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    keys={
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "intermediate_size": "ffn_hidden_size",
        "num_attention_heads": "num_attention_heads",
        "max_position_embeddings": "max_position_embeddings",
        "rotary_pct": _rotary_share,
        "rotary_emb_base": attrgetter("positions.rotary_base"),
        "rope_scaling": rope_scaling_config,
        "hidden_act": activation_name,
        "layer_norm_eps": "norm_epsilon",
        "attention_dropout": "attention_dropout",
        "hidden_dropout": "hidden_dropout",
        "use_parallel_residual": "parallel_residual",
        "attention_bias": attrgetter("attention_output_bias"),
    },
    values_of=_values_of,
    needs=_needs,
    network={
        "embedding.word_embeddings": "gpt_neox.embed_in",
        "final_layernorm": "gpt_neox.final_layer_norm",
        "output_layer": "embed_out",
    },
    layer={
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
        "self_attention.query_key_value": "attention.query_key_value",
        "self_attention.dense": "attention.dense",
        "mlp.dense_h_to_4h": "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h": "mlp.dense_4h_to_h",
    },
    layers="gpt_neox.layers.{}.",
)
