"""Resolution of the network: the ModelSpec that its flags decide."""

import math
from dataclasses import replace
from typing import Any

from megatron.common.registry import POSITION_EMBEDDINGS
from megatron.config.data.tokenizer import TokenizerConfig, padded_vocab_size, true_vocab_size
from megatron.config.network.latent import TRAINED_LENGTH, yarn_scale
from megatron.config.network.layer_pattern import (
    unrotated_layers,
    window_of,
    windowless_layers,
)
from megatron.config.network.model import (
    AttentionSpec,
    MLPSpec,
    ModelConfig,
    NormSpec,
    PositionSpec,
    VocabularySpec,
)
from megatron.config.network.model_spec import OPTIONAL, ModelSpec
from megatron.config.parsing.declaration import resolve


def resolve_model(model: ModelConfig, config: Any, *, vocab_size: int, tensor: int) -> ModelSpec:
    """Return the spec of a GPT with the options that all networks share.

    Args:
        config: a `megatron.config.config.Config`, which has the flags of optional parts too.
        tensor: number of tensor-parallel ranks, which divide the rows of the token table evenly.
    """
    return resolve(
        ModelSpec,
        "model",
        model,
        vocabulary=_vocabulary_spec(model, config.tokenizer, vocab_size, tensor),
        positions=_position_spec(model),
        attention=_attention_spec(model),
        norm=resolve(
            NormSpec,
            "model",
            model,
            embed_layernorm=model.embed_layernorm or config.optimizer.use_bnb_optimizer,
        ),
        mlp=resolve(
            MLPSpec,
            "model",
            model,
            ffn_hidden_size=ffn_hidden_size_of(model),
            activation=activation_of(model),
            glu_clamp=model.activation_func_clamp_value or 0.0,
            left_at_default=["mlp_layout"],
        ),
        **{name: part.of(config) for name, part in OPTIONAL.items()},
        init="xavier_uniform" if model.init_method_xavier_uniform else "normal",
        left_at_default=("architecture", "own_flags", "own", "head"),
    )


def _attention_spec(model: ModelConfig) -> AttentionSpec:
    scalar = query_scalar_of(model)
    return resolve(
        AttentionSpec,
        "model",
        model,
        num_query_groups=num_query_groups_of(model),
        head_dim=head_dim_of(model),
        window=window_of(model.window_size),
        full_attention_layers=full_attention_layers_of(model),
        query_scalar=0.0 if scalar in (None, head_dim_of(model)) else scalar,
        qkv_bias=_attention_bias(model) or model.add_qkv_bias,
        attention_bias_apart=_attention_bias(model) != model.add_bias_linear,
        left_at_default=("attention", "qkv_layout"),
    )


def query_scalar_of(model: ModelConfig) -> float | None:
    """Return the number whose square root divides the scores; None for the features per head.

    YaRN multiplies both sides of each score by a scale in latent attention.
    """
    given, positions = model.query_pre_attn_scalar, stretched(model)
    has_yarn = positions.use_rope_scaling and positions.rope_scaling_type == "yarn"
    if not (has_yarn and model.multi_latent_attention):
        return given
    scale = yarn_scale(positions.rope_scaling_factor, model.mscale_all_dim)
    return given if scale == 1 else (given or head_dim_of(model)) / scale**4


def _vocabulary_spec(
    model: ModelConfig, tokenizer: TokenizerConfig, vocab_size: int, tensor: int
) -> VocabularySpec:
    rows = true_vocab_size(tokenizer, vocab_size)
    padded = padded_vocab_size(
        rows,
        divisible_by=tokenizer.make_vocab_size_divisible_by,
        tensor=tensor,
        pad_to=tokenizer.pad_vocab_size_to,
    )
    return resolve(
        VocabularySpec,
        "model",
        model,
        vocab_size=rows,
        padded_vocab_size=padded,
        padded_vocab_in_softmax=bool(tokenizer.padded_vocab_in_softmax) and padded > rows,
    )


def _position_spec(model: ModelConfig) -> PositionSpec:
    """Return the position embedding of the network."""
    kind = position_of(model)
    turning: dict[str, Any] = {"rotary_dim": 0, "rotary_base": 0.0, "rotary_interpolation": 1.0}
    if kind == "rotary":
        turning = {
            "rotary_dim": rotary_dim_of(model),
            "rotary_base": model.rotary_base,
            "rotary_local_base": model.rotary_local_base or 0.0,
            "unrotated_layers": unrotated_layers(model.no_rope_freq, model.num_layers),
            "rotary_interpolation": model.rotary_seq_len_interpolation_factor or 1.0,
            **_stretching(model),
        }
    return PositionSpec(
        position_embedding=kind,
        max_position_embeddings=model.max_position_embeddings or model.seq_length,
        **{"rope_scaling": 1.0} | turning,
    )


def _attention_bias(model: ModelConfig) -> bool:
    return model.attention_bias == "on" if model.attention_bias else model.add_bias_linear


def _stretching(model: ModelConfig) -> dict[str, Any]:
    """Return the RoPE scaling of the network, as fields of PositionSpec."""
    model = stretched(model)
    if not model.use_rope_scaling or model.rope_scaling_factor == 1:
        return {}
    factor, rule = model.rope_scaling_factor, model.rope_scaling_type
    flags: dict[str, float | None] = {
        "rope_original_length": model.rope_original_max_position_embeddings
    }
    if rule in ("llama3", "yarn"):
        low, high = turns_of(model)
        flags |= {"rope_low_freq_factor": low, "rope_high_freq_factor": high}
    given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    if rule == "yarn":
        scores = yarn_scale(factor, model.mscale_all_dim)
        length_factor = yarn_scale(factor, model.mscale) / scores
        given["rope_attention_factor"] = model.rope_attention_factor or length_factor
        given["rope_truncation"] = model.rope_truncation
    if rule == "longrope":
        length = max(model.rope_original_max_position_embeddings or 0, 2)
        length_factor = math.sqrt(1 + math.log(factor) / math.log(length))
        given["rope_attention_factor"] = model.rope_attention_factor or length_factor
        given["rope_short_factors"] = tuple(model.rope_short_factors or ())
        given["rope_long_factors"] = tuple(model.rope_long_factors or ())
    return {"rope_scaling": factor, "rope_rule": rule, **given}


def stretched(model: ModelConfig) -> ModelConfig:
    """Return the flags with Megatron-LM's --rotary-scaling-factor spelled out."""
    factor, is_latent = model.rotary_scaling_factor, model.multi_latent_attention
    scales_latents = is_latent and model.rope_type != "rope" and factor > 1
    if not scales_latents and model.position_embedding_type != "yarn":
        return model
    return replace(
        model,
        use_rope_scaling=True,
        rope_scaling_type="yarn",
        rope_scaling_factor=factor,
        rope_original_max_position_embeddings=model.rope_original_max_position_embeddings
        or (TRAINED_LENGTH if is_latent else None),
    )


def turns_of(model: ModelConfig) -> tuple[float, float]:
    """Return the turns up to which a wavelength is stretched in full, and from which not at all."""
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    default = 32.0 if model.rope_scaling_type == "yarn" else 4.0
    return 1.0 if low is None else low, default if high is None else high


def ffn_hidden_size_of(model: ModelConfig) -> int:
    """Return the width inside the MLP."""
    return 4 * model.hidden_size if model.ffn_hidden_size is None else model.ffn_hidden_size


def head_dim_of(model: ModelConfig) -> int:
    """Return the features per attention head, of queries and keys."""
    if model.multi_latent_attention:
        return model.qk_head_dim + model.qk_pos_emb_head_dim
    return model.kv_channels or model.hidden_size // max(1, model.num_attention_heads)


def rotary_dim_of(model: ModelConfig) -> int:
    """Return the features of a head that rotary positions turn."""
    if model.multi_latent_attention:
        return model.qk_pos_emb_head_dim
    return int(head_dim_of(model) * model.rotary_percent)


def num_query_groups_of(model: ModelConfig) -> int:
    """Return the number of keys and values per token."""
    if not model.group_query_attention:
        return model.num_attention_heads
    return 1 if model.num_query_groups is None else model.num_query_groups


def position_of(model: ModelConfig) -> str:
    """Return the kind of position embedding."""
    match model.position_embedding_type:
        case "rotary" | "rope" | "yarn":
            return "rotary"
        case "alibi" | "none" | "relative" as other:
            return other
        case str() as name if POSITION_EMBEDDINGS.is_own(name):
            return name
        case None if model.use_rotary_position_embeddings:
            return "rotary"
        case None if not model.add_position_embedding:
            return "none"
    return "learned"


def activation_of(model: ModelConfig) -> str:
    """Return the activation of the MLP."""
    if model.activation is not None:
        return model.activation
    if model.swiglu:
        return "swiglu"
    if model.quick_geglu:
        return "quick_geglu"
    if model.glu_activation is not None:
        return model.glu_activation
    if model.squared_relu:
        return "squared_relu"
    if model.relu:
        return "relu"
    return "gelu_erf" if "erf" in gelu_forms(model).values() else "gelu_tanh"


def gelu_forms(model: ModelConfig) -> dict[str, str]:
    """Return {flag: form} of the flags that name a form of GELU."""
    forms: dict[str, str] = {"--gelu": model.gelu} if model.gelu else {}
    if model.openai_gelu:
        forms["--openai-gelu"] = "tanh"
    if model.onnx_safe in ("True", "true"):
        forms["--onnx-safe"] = "erf"
    return forms


def full_attention_layers_of(model: ModelConfig) -> tuple[int, ...]:
    """Return the numbers, from 1 on, of the layers without the window; () where all are alike.

    Raises:
        ValueError: --window-attn-skip-freq does not fit the layers.
    """
    if model.window_attn_skip_freq is None or not window_of(model.window_size):
        return ()
    return windowless_layers(model.window_attn_skip_freq, model.num_layers)
