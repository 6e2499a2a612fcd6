"""Network options that another program's files can express; all others are refused by default."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.config.flag_names import not_in_weights
from megatron.config.network.model_spec import ModelSpec, defaults_of, flat

Allowed = Mapping[str, tuple[Any, ...] | None]
"""Values of ModelSpec fields that files express; None for all."""

_EVERYWHERE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"),
    *("max_position_embeddings", "vocab_size", "padded_vocab_size", "norm_epsilon", "layernorm_1p"),
    "tied_embeddings",
    # Resolved from other fields.
    *("attention_bias_apart", "full_attention_layers", "expert_ffn_hidden_size"),
    "experts_per_token",
    # Zero or neutral without rotary positions.
    *("rotary_dim", "rotary_base", "rope_scaling"),
)
"""Fields of any value, unless a format says otherwise, besides those that weights do not depend on."""


def plain_values(spec: ModelSpec) -> Allowed:
    """Return the values of a plain network's fields, for a format that names no others.

    A field that is not mentioned here has its default.
    """
    defaults = {name: (value,) for name, value in defaults_of(spec).items()}
    return {
        **defaults,
        **dict.fromkeys((*_EVERYWHERE, *not_in_weights())),
        "position_embedding": ("learned",),
        "rotary_interpolation": (1.0,) if spec.positions.rope_scaling != 1 else None,
        "window": (0,),
        "normalization": ("LayerNorm",),
        "embed_layernorm": (False,),
        "qk_layernorm": (False,),
        "residual_after_norm": (False,),
        "activation": ("gelu_tanh", "gelu_erf"),
        "linear_bias": (True,),
        "attention_output_bias": (True,),
        "qkv_bias": (spec.attention_output_bias,),
        "num_query_groups": (spec.attention.num_attention_heads,),
        "head_dim": (spec.hidden_size / spec.attention.num_attention_heads,),
    }


def not_expressed(spec: ModelSpec, allowed: Allowed) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Yield each field with a value that files do not express, with it and those that they do.

    A field that `allowed` does not have is not expressed, so that one that is added later is refused
    until a format names it.

    Args:
        allowed: `plain_values`, and changes of it.
    """
    given = flat(spec) | {"attention_output_bias": spec.attention_output_bias}
    for name, value in given.items():
        values = allowed.get(name, ())
        if values is not None and value not in values:
            yield name, value, values
