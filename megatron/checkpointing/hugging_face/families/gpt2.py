"""GPT-2: learned positions, LayerNorm, a plain MLP, linear layers kept as [in, out]."""

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
    linear,
    network_parts,
    norm,
)
from megatron.checkpointing.hugging_face.tensor_mapping import StackedTransposed, Transposed
from megatron.config.network.model_spec import ModelSpec

_NAMES = Names(
    table="transformer.wte",
    positions="transformer.wpe",
    layer="transformer.h.{}.",
    final_norm="transformer.ln_f",
)


def _needs(spec: ModelSpec) -> Mapping[str, tuple[Any, ...]]:
    return {
        "position_embedding": ("learned",),
        "normalization": ("LayerNorm",),
        "activation": PLAIN_ACTIVATIONS,
        "linear_bias": (True,),
        "attention_output_bias": (True,),
        "qkv_bias": (True,),
        "num_query_groups": (spec.num_attention_heads,),
        "head_dim": (spec.hidden_size / spec.num_attention_heads,),
        "embed_layernorm": (False,),
        "scaled_embedding": (False,),
        "qk_layernorm": (False,),
        "residual_after_norm": (False,),
        "parallel_residual": (False,),
        "window": (0,),
        "num_experts": ((),),
    }


def _config(spec: ModelSpec) -> dict[str, Any]:
    return {
        "n_layer": spec.num_layers,
        "n_embd": spec.hidden_size,
        "n_inner": spec.ffn_hidden_size,
        "n_head": spec.num_attention_heads,
        "n_positions": spec.max_position_embeddings,
        "n_ctx": spec.max_position_embeddings,  # read by converters of other programs
        "activation_function": ACTIVATIONS[spec.activation],
        "layer_norm_epsilon": spec.norm_epsilon,
        "attn_pdrop": spec.attention_dropout,
        "embd_pdrop": spec.hidden_dropout,
        "resid_pdrop": spec.hidden_dropout,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    }


def _parts(spec: ModelSpec) -> Iterator[Part]:
    qkv = StackedTransposed(heads=spec.num_attention_heads, head_dim=spec.head_dim)

    def layer(ours: str, theirs: str) -> Iterator[Part]:
        yield from norm(spec, f"{ours}input_layernorm", f"{theirs}ln_1")
        yield from norm(spec, f"{ours}post_attention_layernorm", f"{theirs}ln_2")
        for own, other, mapping in (
            ("self_attention.query_key_value", "attn.c_attn", qkv),
            ("self_attention.dense", "attn.c_proj", Transposed()),
            ("mlp.dense_h_to_4h", "mlp.c_fc", Transposed()),
            ("mlp.dense_4h_to_h", "mlp.c_proj", Transposed()),
        ):
            yield from linear(f"{ours}{own}", (f"{theirs}{other}",), mapping, has_bias=True)

    return network_parts(spec, _NAMES, layer)


def _flags(config: HuggingFaceConfig) -> list[str]:
    return [
        *("--num-layers", str(config["n_layer"])),
        *("--hidden-size", str(config["n_embd"])),
        *("--ffn-hidden-size", str(config["n_inner"] or 4 * config["n_embd"])),
        *("--num-attention-heads", str(config["n_head"])),
        *("--max-position-embeddings", str(config["n_positions"])),
        *("--position-embedding-type", "learned_absolute"),
        *activation_flags(config["activation_function"], gated=False),
        *("--layernorm-epsilon", str(config["layer_norm_epsilon"])),
        *("--attention-dropout", str(config["attn_pdrop"])),
        *("--hidden-dropout", str(config["resid_pdrop"])),
    ]


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    needs=_needs,
    config=_config,
    parts=_parts,
    flags=_flags,
)
