"""BLOOM: ALiBi and a norm behind the token embedding; its tensors lie as ours do."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.checkpointing.hugging_face.families.family import (
    Family,
    HuggingFaceConfig,
    Names,
    Part,
    linear,
    network_parts,
    norm,
)
from megatron.config.network.model_spec import ModelSpec

_NAMES = Names(
    table="transformer.word_embeddings",
    table_norm="transformer.word_embeddings_layernorm",
    layer="transformer.h.{}.",
    final_norm="transformer.ln_f",
)


def _needs(spec: ModelSpec) -> Mapping[str, tuple[Any, ...]]:
    return {
        "position_embedding": ("alibi",),
        "embed_layernorm": (True,),
        "scaled_embedding": (False,),
        "normalization": ("LayerNorm",),
        "activation": ("gelu_tanh",),
        "ffn_hidden_size": (4 * spec.hidden_size,),
        "linear_bias": (True,),
        "attention_output_bias": (True,),
        "qkv_bias": (True,),
        "num_query_groups": (spec.num_attention_heads,),
        "head_dim": (spec.hidden_size / spec.num_attention_heads,),
        "qk_layernorm": (False,),
        "parallel_residual": (False,),
        "window": (0,),
        "num_experts": ((),),
    }


def _config(spec: ModelSpec) -> dict[str, Any]:
    return {
        "n_layer": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "n_head": spec.num_attention_heads,
        "layer_norm_epsilon": spec.norm_epsilon,
        "apply_residual_connection_post_layernorm": spec.residual_after_norm,
        "attention_dropout": spec.attention_dropout,
        "hidden_dropout": spec.hidden_dropout,
        "seq_length": spec.max_position_embeddings,
    }


def _parts(spec: ModelSpec) -> Iterator[Part]:
    def layer(ours: str, theirs: str) -> Iterator[Part]:
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield from norm(spec, f"{ours}{name}", f"{theirs}{name}")
        for name in (
            *("self_attention.query_key_value", "self_attention.dense"),
            *("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        ):
            yield from linear(f"{ours}{name}", (f"{theirs}{name}",), has_bias=True)

    return network_parts(spec, _NAMES, layer)


def _flags(config: HuggingFaceConfig) -> list[str]:
    after = config["apply_residual_connection_post_layernorm"]
    return [
        *("--num-layers", str(config["n_layer"])),
        *("--hidden-size", str(config["hidden_size"])),
        *("--num-attention-heads", str(config["n_head"])),
        # ALiBi has no most; 2048 is what BLOOM was trained with.
        *("--max-position-embeddings", str(config.get("seq_length") or 2048)),
        *("--position-embedding-type", "alibi", "--embed-layernorm"),
        *("--layernorm-epsilon", str(config["layer_norm_epsilon"])),
        *(["--apply-residual-connection-post-layernorm"] if after else []),
        *("--attention-dropout", str(config["attention_dropout"])),
        *("--hidden-dropout", str(config["hidden_dropout"])),
    ]


BLOOM = Family(
    model_type="bloom",
    architecture="BloomForCausalLM",
    prefix="transformer.",
    needs=_needs,
    config=_config,
    parts=_parts,
    flags=_flags,
)
