"""GPT-NeoX and Pythia: rotary positions of a share of each head, LayerNorm, parallel residuals."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.checkpointing.hugging_face.families.family import (
    ACTIVATIONS,
    PLAIN_ACTIVATIONS,
    Family,
    HuggingFaceConfig,
    Names,
    Part,
    activation_flags,
    bias_flags,
    linear,
    network_parts,
    norm,
)
from megatron.checkpointing.hugging_face.families.rotary import rope_scaling_config, rotary_flags
from megatron.config.network.model_spec import ModelSpec

_NAMES = Names(
    table="gpt_neox.embed_in",
    layer="gpt_neox.layers.{}.",
    final_norm="gpt_neox.final_layer_norm",
    head="embed_out",
)


def _needs(spec: ModelSpec) -> Mapping[str, tuple[Any, ...]]:
    return {
        "position_embedding": ("rotary",),
        "rotary_interpolation": (1.0,) if spec.rope_scaling != 1 else (spec.rotary_interpolation,),
        "normalization": ("LayerNorm",),
        "activation": PLAIN_ACTIVATIONS,
        "linear_bias": (True,),
        "qkv_bias": (spec.attention_output_bias,),
        "num_query_groups": (spec.num_attention_heads,),
        "head_dim": (spec.hidden_size / spec.num_attention_heads,),
        "embed_layernorm": (False,),
        "scaled_embedding": (False,),
        "qk_layernorm": (False,),
        "residual_after_norm": (False,),
        "window": (0,),
        "num_experts": ((),),
    }


def _config(spec: ModelSpec) -> dict[str, Any]:
    return {
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_hidden_size,
        "num_attention_heads": spec.num_attention_heads,
        "max_position_embeddings": spec.max_position_embeddings,
        "rotary_pct": spec.rotary_dim / spec.head_dim,
        "rotary_emb_base": spec.rotary_base,
        "rope_scaling": rope_scaling_config(spec),
        "hidden_act": ACTIVATIONS[spec.activation],
        "layer_norm_eps": spec.norm_epsilon,
        "attention_dropout": spec.attention_dropout,
        "hidden_dropout": spec.hidden_dropout,
        "use_parallel_residual": spec.parallel_residual,
        "attention_bias": spec.attention_output_bias,
    }


def _parts(spec: ModelSpec) -> Iterator[Part]:
    def layer(ours: str, theirs: str) -> Iterator[Part]:
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield from norm(spec, f"{ours}{name}", f"{theirs}{name}")
        for own, other, has_bias in (
            ("self_attention.query_key_value", "attention.query_key_value", spec.qkv_bias),
            ("self_attention.dense", "attention.dense", spec.attention_output_bias),
            ("mlp.dense_h_to_4h", "mlp.dense_h_to_4h", True),
            ("mlp.dense_4h_to_h", "mlp.dense_4h_to_h", True),
        ):
            yield from linear(f"{ours}{own}", (f"{theirs}{other}",), has_bias=has_bias)

    return network_parts(spec, _NAMES, layer)


def _flags(config: HuggingFaceConfig) -> list[str]:
    return [
        *("--num-layers", str(config["num_hidden_layers"])),
        *("--hidden-size", str(config["hidden_size"])),
        *("--ffn-hidden-size", str(config["intermediate_size"])),
        *("--num-attention-heads", str(config["num_attention_heads"])),
        *("--max-position-embeddings", str(config["max_position_embeddings"])),
        *rotary_flags(config),
        *("--layernorm-epsilon", str(config["layer_norm_eps"])),
        *(["--parallel-residual"] if config["use_parallel_residual"] else []),
        *activation_flags(config["hidden_act"], gated=False),
        *bias_flags(attention=config.get("attention_bias", True), mlp=True),
        *("--attention-dropout", str(config["attention_dropout"])),
        *("--hidden-dropout", str(config["hidden_dropout"])),
    ]


GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    needs=_needs,
    config=_config,
    parts=_parts,
    flags=_flags,
)
