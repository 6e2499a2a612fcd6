"""Checks of the network: why it cannot be built or divided."""

from collections.abc import Collection, Iterator, Mapping

from megatron.config.data.masks import MaskConfig
from megatron.config.network.layer_pattern import unrotated_layers, window_of
from megatron.config.network.model import GATED, ModelConfig
from megatron.config.network.model_resolution import (
    activation_of,
    ffn_hidden_size_of,
    full_attention_layers_of,
    gelu_forms,
    head_dim_of,
    num_query_groups_of,
    position_of,
    rotary_dim_of,
    stretched,
    turns_of,
)
from megatron.config.network.model_spec import ModelSpec
from megatron.config.parallelism.layout import ParallelConfig
from megatron.config.parallelism.precision import PrecisionConfig
from megatron.config.parsing.declaration import range_problems

_FP8_MULTIPLE = 16


def model_problems(model: ModelConfig, *, tensor: int) -> Iterator[str]:
    """Yield every reason why this network cannot be built or divided."""
    yield from range_problems(model)
    if any(range_problems(model, *_DIVIDED)):
        return
    yield from _attention_problems(model, tensor)
    if ffn_hidden_size_of(model) % tensor:
        yield _indivisible("--ffn-hidden-size", ffn_hidden_size_of(model), tensor)
    yield from _position_problems(model)
    yield from _stretching_problems(stretched(model))
    yield from _activation_problems(model)
    yield from _norm_problems(model, tensor)
    if model.parallel_residual and model.apply_residual_connection_post_layernorm:
        yield (
            "--parallel-residual adds attention and MLP to one residual, and "
            "--apply-residual-connection-post-layernorm takes one after each of two norms: "
            "give one of them"
        )
    if model.add_qkv_bias and model.add_bias_linear:
        yield (
            "--add-qkv-bias keeps a bias that --disable-bias-linear takes out; without that flag "
            "it is there: leave --add-qkv-bias out"
        )
    if model.add_qkv_bias and model.attention_bias:
        yield (
            f"--attention-bias {model.attention_bias} is of queries, keys and values too: leave "
            "--add-qkv-bias out"
        )


def _norm_problems(model: ModelConfig, tensor: int) -> Iterator[str]:
    if not model.input_norm and not model.sandwich_norm:
        yield "--no-input-norm needs --sandwich-norm: layers without any norm do not train"
    other = {
        "--apply-residual-connection-post-layernorm": (
            model.apply_residual_connection_post_layernorm
        ),
        "--fp32-residual-connection": model.fp32_residual_connection,
    }
    if not model.input_norm:
        yield from flag_problems(other, "needs the norms that --no-input-norm takes out")
    if not model.qk_layernorm_across_heads:
        return
    groups = num_query_groups_of(model)
    if not model.qk_layernorm:
        yield "--qk-layernorm-across-heads needs --qk-layernorm"
    if model.normalization != "RMSNorm":
        yield (
            f"--qk-layernorm-across-heads needs --normalization RMSNorm, not {model.normalization}"
        )
    if groups % tensor:
        yield f"--qk-layernorm-across-heads: {_indivisible('--num-query-groups', groups, tensor)}"


def flag_problems(flags: Mapping[str, bool], reason: str) -> Iterator[str]:
    """Yield a message for each of `flags` that is given, by its words on the command line."""
    return (f"{flag} {reason}" for flag, is_given in flags.items() if is_given)


def unbuilt_flags(
    model: ModelConfig,
    masks: MaskConfig,
    parallel: ParallelConfig,
    *,
    positions: Collection[str],
) -> dict[str, bool]:
    """Return which flags of data and layout networks with cross-attention do not have.

    Args:
        positions: that the network has.
    """
    position = position_of(model)
    return {
        f"--position-embedding-type {position}": position not in positions,
        "--reset-position-ids": masks.reset_position_ids,
        "--reset-attention-mask": masks.reset_attention_mask,
        "--ds-sequence-parallel-size": parallel.ds_sequence_parallel_size > 1,
        "--context-parallel-size": parallel.context_parallel_size > 1,
    }


def encoder_problems(model: ModelConfig, masks: MaskConfig, reason: str) -> Iterator[str]:
    """Yield the flags of decoders, which have no meaning with bidirectional attention.

    Args:
        reason: end of the messages.
    """
    flags = {
        "--position-embedding-type alibi": position_of(model) == "alibi",
        "--reset-position-ids": masks.reset_position_ids,
        "--reset-attention-mask": masks.reset_attention_mask,
        "--eod-mask-loss": masks.eod_mask_loss,
    }
    return flag_problems(flags, reason)


_ROTARY = (
    *("rotary_percent", "rotary_base", "rotary_local_base", "rope_scaling_factor"),
    "rotary_seq_len_interpolation_factor",
)
"""Settings that mean nothing without rotary positions."""

_DIVIDED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "num_query_groups",
    "kv_channels",
)
"""Sizes that other checks divide by, or divide."""


def _attention_problems(model: ModelConfig, tensor: int) -> Iterator[str]:
    heads, groups = model.num_attention_heads, num_query_groups_of(model)
    derives = model.kv_channels is None and not model.multi_latent_attention
    if derives and model.hidden_size % heads:
        yield (
            f"--hidden-size {model.hidden_size} is not a multiple of --num-attention-heads "
            f"{heads}; change one of them or give --kv-channels"
        )
    if heads % tensor:
        yield _indivisible("--num-attention-heads", heads, tensor)
    if model.num_query_groups is not None and not model.group_query_attention:
        yield f"--num-query-groups {model.num_query_groups} needs --group-query-attention"
    elif heads % groups:
        yield (
            f"--num-attention-heads {heads} is not a multiple of --num-query-groups {groups}: "
            "every group has as many heads as the others"
        )
    elif not heads % tensor:
        yield from query_group_problems(groups, head_dim_of(model), tensor)
    try:
        window_of(model.window_size)
    except ValueError:
        yield (
            f"--window-size {model.window_size} is not LEFT or LEFT,0 with LEFT at least 0, or -1 "
            "for no window: a token sees no later tokens"
        )
        return
    for flag, value in (
        ("--window-attn-skip-freq", model.window_attn_skip_freq),
        ("--rotary-local-base", model.rotary_local_base),
    ):
        if value is not None and not window_of(model.window_size):
            yield f"{flag} {value} needs --window-size"
    try:
        full_attention_layers_of(model)
    except ValueError as error:
        yield str(error)


def _position_problems(model: ModelConfig) -> Iterator[str]:
    positions, kind = model.max_position_embeddings, model.position_embedding_type
    if positions is not None and positions < model.seq_length:
        yield (
            f"--max-position-embeddings {positions} is less than --seq-length {model.seq_length}; "
            "every position needs a row"
        )
    if model.use_rotary_position_embeddings and kind not in (None, "rotary", "rope", "yarn"):
        yield (
            f"--use-rotary-position-embeddings and --position-embedding-type {kind} contradict "
            "each other: give one of them"
        )
    if not model.add_position_embedding and kind in ("learned_absolute", "absolute"):
        yield (
            f"--no-position-embedding and --position-embedding-type {kind} contradict each other: "
            "give one of them"
        )
    if position_of(model) == "rotary":
        yield from _rotary_problems(model)
        return
    flags = {
        "--no-rope-freq": model.no_rope_freq is not None,
        "--rotary-local-base": bool(model.rotary_local_base),
        "--rotary-percent": model.rotary_percent != 1,
        "--rotary-seq-len-interpolation-factor": bool(model.rotary_seq_len_interpolation_factor),
        "--use-rope-scaling": model.use_rope_scaling,
    }
    yield from flag_problems(flags, "needs --position-embedding-type rotary")


def _stretching_problems(model: ModelConfig) -> Iterator[str]:
    rule, length = model.rope_scaling_type, model.rope_original_max_position_embeddings
    for flag, value, rules in (
        ("--rope-low-freq-factor", model.rope_low_freq_factor, ("llama3", "yarn")),
        ("--rope-high-freq-factor", model.rope_high_freq_factor, ("llama3", "yarn")),
        (
            "--rope-original-max-position-embeddings",
            length,
            ("llama3", "yarn", "dynamic", "longrope"),
        ),
        ("--rope-attention-factor", model.rope_attention_factor, ("yarn", "longrope")),
        ("--rope-short-factors", model.rope_short_factors, ("longrope",)),
        ("--rope-long-factors", model.rope_long_factors, ("longrope",)),
    ):
        if value is None:
            continue
        if not model.use_rope_scaling:
            yield f"{flag} {value} needs --use-rope-scaling"
        elif rule not in rules:
            yield f"{flag} {value} needs --rope-scaling-type {' or '.join(rules)}"
    low, high = turns_of(model)
    if low >= high:
        yield (
            f"--rope-low-freq-factor {low} must be less than --rope-high-freq-factor {high}: "
            "wavelengths between the two are stretched in part"
        )
    if rule != "llama3" and not model.use_rope_scaling:
        yield f"--rope-scaling-type {rule} needs --use-rope-scaling"
    elif rule != "llama3":
        yield from _length_problems(model)
    if not model.rope_truncation and rule != "yarn":
        yield "--no-rope-truncation needs --rope-scaling-type yarn"


def _length_problems(model: ModelConfig) -> Iterator[str]:
    rule, length = model.rope_scaling_type, model.rope_original_max_position_embeddings
    if model.rope_scaling_factor <= 1:
        factor = "rotary" if model.position_embedding_type == "yarn" else "rope"
        yield (
            f"--{factor}-scaling-factor {model.rope_scaling_factor} must be more than 1 with "
            f"--rope-scaling-type {rule}"
        )
    positions = model.max_position_embeddings or model.seq_length
    pairs = rotary_dim_of(model) // 2
    for flag, factors in (
        ("--rope-short-factors", model.rope_short_factors),
        ("--rope-long-factors", model.rope_long_factors),
    ):
        if rule == "longrope" and len(factors or ()) != pairs:
            yield (
                f"--rope-scaling-type longrope needs {flag} with {pairs} numbers, one for each "
                f"rotated pair of features, got {len(factors or ())}"
            )
    if length is None:
        yield (
            f"--rope-scaling-type {rule} needs --rope-original-max-position-embeddings: the tokens "
            "that the network was trained on before"
        )
    elif rule == "dynamic" and positions != length:
        yield (
            f"--rope-scaling-type dynamic: --max-position-embeddings {positions} must be the "
            f"--rope-original-max-position-embeddings {length}, because the angles of longer texts "
            "would depend on how long each is"
        )


def _rotary_problems(model: ModelConfig) -> Iterator[str]:
    yield from range_problems(model, *_ROTARY)
    if model.position_embedding_type == "yarn":
        others = {
            "--multi-latent-attention": model.multi_latent_attention,
            "--use-rope-scaling": model.use_rope_scaling,
            f"--rope-scaling-factor {model.rope_scaling_factor:g}": model.rope_scaling_factor
            != ModelConfig.rope_scaling_factor,
            # Megatron-LM turns all features then, whatever the flag says.
            f"--rotary-percent {model.rotary_percent:g}": model.rotary_percent != 1,
        }
        reason = "does not go with --position-embedding-type yarn: write rope there"
        yield from flag_problems(others, reason)
    try:
        unrotated_layers(model.no_rope_freq, model.num_layers)
    except ValueError as error:
        yield str(error)
    if model.multi_latent_attention:  # which has a size of its own for turned features
        return
    percent, head_dim = model.rotary_percent, head_dim_of(model)
    turned = rotary_dim_of(model)
    if 0 < percent <= 1 and (turned < 2 or turned % 2):
        yield (
            f"--rotary-percent {percent} of {head_dim} features per head are {turned}: rotary "
            "positions turn pairs, so an even number above 0 is needed"
        )


def _activation_problems(model: ModelConfig) -> Iterator[str]:
    given = [
        *(["--swiglu"] if model.swiglu else []),
        *(["--quick-geglu"] if model.quick_geglu else []),
        *([f"--glu-activation {model.glu_activation}"] if model.glu_activation else []),
        *(["--squared-relu"] if model.squared_relu else []),
        *(["--relu"] if model.relu else []),
        *([f"--activation {model.activation}"] if model.activation else []),
    ]
    twice = [[f"--{name}", f"--glu-activation {name}"] for name in ("swiglu", "quick_geglu")]
    if len(given) > 1 and given not in twice:
        yield f"{' and '.join(given)} exclude each other: give one of them"
    changes = {
        f"--activation-func-clamp-value {model.activation_func_clamp_value}": bool(
            model.activation_func_clamp_value
        ),
        f"--glu-linear-offset {model.glu_linear_offset}": model.glu_linear_offset != 0,
    }
    if activation_of(model) not in GATED:
        gates = "--swiglu, --quick-geglu or --glu-activation"
        yield from flag_problems(changes, f"needs a gated MLP: add {gates}, or leave it out")
    forms = gelu_forms(model)
    if len({*forms.values()}) > 1:
        both = " and ".join(f"{flag} ({form})" for flag, form in forms.items())
        yield f"{both} name two forms of GELU: give one of them"
    if forms and given:
        yield (
            f"{next(iter(forms))} chooses a form of the plain MLP's GELU, which {given[0]} "
            "replaces: leave it out"
        )


def query_group_problems(
    groups: int, head_dim: int, tensor: int, *, flag: str = "--tensor-model-parallel-size"
) -> Iterator[str]:
    """Yield why `tensor` tensor-parallel ranks cannot divide the query groups, or share them.

    Args:
        flag: that `tensor` is the value of.
    """
    if groups % tensor and tensor % groups:
        yield (
            f"--num-query-groups {groups} is not a multiple of {flag} {tensor}, nor a divisor of it: every rank "
            f"needs full groups of heads, or a part of one; take {tensor} groups, or other ranks"
        )
    elif 2 * groups * head_dim % tensor:
        yield (
            f"{flag} {tensor} does not divide the {2 * groups * head_dim} "
            f"features of keys and values (--num-query-groups {groups}); take fewer ranks"
        )


def _indivisible(flag: str, value: int, tensor: int) -> str:
    return f"{flag} {value} is not a multiple of --tensor-model-parallel-size {tensor}"


def fp8_size_problems(precision: PrecisionConfig, spec: ModelSpec, *, tensor: int) -> Iterator[str]:
    """Yield the sizes of weights on a rank that products of fp8 matrices do not take.

    Source: torch's `_scaled_mm`, whose matrices have columns and inner features in multiples of 16.
    """
    if precision.fp8_format is None:
        return
    queries, keys = spec.attention.query_features, spec.attention.key_features
    sizes = {
        "--hidden-size": spec.hidden_size,
        "features of queries, keys and values": (queries + 2 * keys) // tensor,
        "features of heads": queries // tensor,
        "features of values": spec.attention.num_attention_heads * spec.value_dim // tensor,
        **{name: size for part in spec.parts for name, size in part.widths(tensor).items()},
        "--ffn-hidden-size": spec.mlp.ffn_hidden_size // tensor,
    }
    for name, size in sizes.items():
        if size % _FP8_MULTIPLE:
            yield (
                f"--fp8-format {precision.fp8_format} takes sizes that {_FP8_MULTIPLE} divides: "
                f"{name} on a tensor-parallel rank is {size}"
            )
