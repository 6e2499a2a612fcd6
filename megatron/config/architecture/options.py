"""Options that layers read, as fields of ModelSpec: a network refuses options it does not name."""

from megatron.config.network.model_spec import (
    OPTIONAL,
    ModelSpec,
    defaults_of,
    every_field,
    flat,
    names_of,
)

COMMON = frozenset(
    (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "head_dim"),
        *("num_query_groups", "seq_length", "max_position_embeddings", "vocab_size"),
        *("padded_vocab_size", "padded_vocab_in_softmax", "position_embedding", "normalization"),
        *("norm_epsilon", "layernorm_1p", "qk_layernorm", "activation", "linear_bias", "qkv_bias"),
        *("attention_bias_apart", "query_key_layer_scaling", "query_scalar", "attention_softcap"),
        *("logit_softcap", "fp32_residual", "attention_dropout", "hidden_dropout"),
        *("init", "init_std", "attention", "own_flags", "architecture"),
        *("qkv_layout", "mlp_layout"),
    )
)
"""Of attention, MLP, norms and logits, which all networks here are made of."""

ROTARY = frozenset(
    (
        *("rotary_dim", "rotary_base", "rotary_interpolation", "rope_scaling", "rope_rule"),
        *("rope_low_freq_factor", "rope_high_freq_factor", "rope_original_length"),
        *("rope_attention_factor", "rope_truncation", "rope_short_factors", "rope_long_factors"),
    )
)
EMBEDDING = frozenset(("embed_layernorm", "scaled_embedding", "tied_embeddings"))
"""Options of `EmbeddingPipe`, and of logits with an untied table."""
STREAM = frozenset(("parallel_residual", "residual_after_norm", "sandwich_norm"))
_WINDOWS = ("window", "full_attention_layers", "rotary_local_base")
_GROUPS: tuple[tuple[str, ...], ...] = (_WINDOWS, *map(names_of, OPTIONAL.values()))
"""The first option of each group decides whether the rest have an effect."""

DECODER = every_field() - {"relative_buckets", "relative_max_distance"}
"""All options of a GPT, also ones added later: its layers are the reference for other networks."""


def ignored_options(spec: ModelSpec, plain: ModelSpec, options: frozenset[str]) -> list[str]:
    """Return the options that a network is given and does not have.

    Args:
        spec: the network.
        plain: the same without any option.
        options: the options that it has.
    """
    now, without = flat(spec), defaults_of(spec) | flat(plain)
    names = [name for name in now if name not in options]
    given = {name for name in names if now[name] != without[name]}
    for first, *others in _GROUPS:
        if first in given:
            given -= {*others}
    return [name for name in names if name in given]
