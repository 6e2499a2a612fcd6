"""Rotary position embeddings in config.json, in the older keys that all versions of transformers read."""

from typing import Any

from megatron.checkpointing.expressed import Allowed
from megatron.checkpointing.hugging_face.families.family import HuggingFaceConfig
from megatron.common.errors import CheckpointError
from megatron.config.network.latent import yarn_scale
from megatron.config.network.model_spec import ModelSpec
from megatron.config.parsing.files import Values

EXPRESSED: Allowed = dict.fromkeys(
    (
        *("rope_rule", "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_length"),
        *("rope_attention_factor", "rope_truncation", "rope_short_factors", "rope_long_factors"),
    )
)
"""Fields of any value, because `rope_scaling_config` has them."""

_LLAMA_3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def rope_scaling_config(spec: ModelSpec) -> dict[str, Any] | None:
    """Build `rope_scaling` of config.json; None without scaling."""
    positions = spec.positions
    if positions.rope_scaling == 1:
        factor = positions.rotary_interpolation
        return None if factor == 1 else {"rope_type": "linear", "factor": factor}
    rope: dict[str, Any] = {
        "rope_type": positions.rope_rule,
        "factor": positions.rope_scaling,
    }
    if positions.rope_rule == "dynamic":
        return rope
    low, high = positions.rope_low_freq_factor, positions.rope_high_freq_factor
    if positions.rope_rule == "llama3":
        rope |= {"low_freq_factor": low, "high_freq_factor": high}
    elif positions.rope_rule == "longrope":
        rope |= {
            "short_factor": [*positions.rope_short_factors],
            "long_factor": [*positions.rope_long_factors],
            "attention_factor": positions.rope_attention_factor,
        }
    else:
        rope |= {
            "beta_slow": low,
            "beta_fast": high,
            "attention_factor": positions.rope_attention_factor,
            "truncate": positions.rope_truncation,
        }
    return {**rope, "original_max_position_embeddings": positions.rope_original_length}


def rotary_values(config: HuggingFaceConfig) -> Values:
    """Translate the rotary keys of config.json to settings.

    Raises:
        CheckpointError: no flag expresses this kind of scaling.
    """
    rope = {
        "rope_theta": config.get("rope_theta", config.get("rotary_emb_base", 10000.0)),
        "partial_rotary_factor": config.get("rotary_pct", config.get("partial_rotary_factor")),
        **(config.get("rope_scaling") or {}),
        **(config.get("rope_parameters") or {}),
    }
    share = rope["partial_rotary_factor"]
    return {
        "position_embedding_type": "rotary",
        "rotary_base": float(rope["rope_theta"]),
        **({"rotary_percent": share} if share not in (None, 1, 1.0) else {}),
        **_stretching_values(rope, int(config["max_position_embeddings"])),
    }


def _stretching_values(rope: dict[str, Any], positions: int) -> Values:
    match rope.get("rope_type", rope.get("type", "default")):
        case "default":
            return {}
        case "linear":
            return {"rotary_seq_len_interpolation_factor": float(rope["factor"])}
        case "llama3" if all(name in rope for name in _LLAMA_3):
            low, high, length = (rope[name] for name in _LLAMA_3)
            return _rule_values("llama3", rope["factor"], length, (low, high))
        case "dynamic":
            return _rule_values("dynamic", rope["factor"], positions)
        case "yarn":
            return _yarn_values(rope, positions)
        case "longrope" | "su":
            return _longrope_values(rope, positions)
    raise CheckpointError(
        f"config.json: there is no flag for rotary positions of the kind {rope}; known are "
        f"default, linear, dynamic, yarn, longrope, and llama3 with {', '.join(_LLAMA_3)}"
    )


def _rule_values(
    rule: str, factor: float, length: int, turns: tuple[float, float] | None = None
) -> Values:
    names = ("rope_low_freq_factor", "rope_high_freq_factor")
    return {
        **{"use_rope_scaling": True, "rope_scaling_type": rule},
        "rope_scaling_factor": float(factor),
        **dict(zip(names, map(float, turns or ()), strict=False)),
        "rope_original_max_position_embeddings": int(length),
    }


def _longrope_values(rope: dict[str, Any], positions: int) -> Values:
    length = int(rope.get("original_max_position_embeddings") or positions)
    attention, factor = rope.get("attention_factor"), rope.get("factor") or positions / length
    if factor <= 1:
        raise CheckpointError(
            f"config.json: longrope positions stretch nothing where original_max_position_embeddings "
            f"and max_position_embeddings are {length} and {positions}; give both"
        )
    return {
        **_rule_values("longrope", factor, length),
        "rope_short_factors": [*map(float, rope["short_factor"])],
        "rope_long_factors": [*map(float, rope["long_factor"])],
        **({} if attention is None else {"rope_attention_factor": float(attention)}),
    }


def _yarn_values(rope: dict[str, Any], positions: int) -> Values:
    length = rope.get("original_max_position_embeddings") or positions
    factor = rope.get("factor") or positions / length
    attention = rope.get("attention_factor")
    numerator, denominator = rope.get("mscale"), rope.get("mscale_all_dim")
    if attention is None and numerator and denominator:
        attention = yarn_scale(factor, numerator) / yarn_scale(factor, denominator)
    turns = (rope.get("beta_slow") or 1, rope.get("beta_fast") or 32)
    return {
        **_rule_values("yarn", factor, length, turns),
        **({} if attention is None else {"rope_attention_factor": float(attention)}),
        "rope_truncation": rope.get("truncate", True),
    }
