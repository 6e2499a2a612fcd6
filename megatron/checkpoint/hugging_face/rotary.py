"""Rotary positions in config.json: in the older keys, which every version of transformers reads."""

from typing import Any

from megatron.checkpoint.hugging_face.family import HuggingFaceConfig
from megatron.errors import CheckpointError
from megatron.plan.model_spec import ModelSpec

_LLAMA_3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def stretching(spec: ModelSpec) -> dict[str, Any] | None:
    """Return how wavelengths are stretched, as config.json says it; None when they are not."""
    if spec.rope_scaling != 1:
        return {
            "rope_type": "llama3",
            "factor": spec.rope_scaling,
            "low_freq_factor": spec.rope_low_freq_factor,
            "high_freq_factor": spec.rope_high_freq_factor,
            "original_max_position_embeddings": spec.rope_original_length,
        }
    if spec.rotary_interpolation != 1:
        return {"rope_type": "linear", "factor": spec.rotary_interpolation}
    return None


def rotary_flags(config: HuggingFaceConfig) -> list[str]:
    """Return the flags of rotary positions.

    Raises:
        CheckpointError: they are of a kind that no flag says.
    """
    said = {
        "rope_theta": config.get("rope_theta", config.get("rotary_emb_base", 10000.0)),
        "partial_rotary_factor": config.get("rotary_pct", config.get("partial_rotary_factor")),
        **(config.get("rope_scaling") or {}),
        **(config.get("rope_parameters") or {}),
    }
    share = said["partial_rotary_factor"]
    return [
        *("--position-embedding-type", "rotary", "--rotary-base", str(float(said["rope_theta"]))),
        *(["--rotary-percent", str(share)] if share not in (None, 1, 1.0) else []),
        *_stretching_flags(said),
    ]


def _stretching_flags(said: dict[str, Any]) -> list[str]:
    match said.get("rope_type", said.get("type", "default")):
        case "default":
            return []
        case "linear":
            return ["--rotary-seq-len-interpolation-factor", str(float(said["factor"]))]
        case "llama3" if all(name in said for name in _LLAMA_3):
            low, high, length = (said[name] for name in _LLAMA_3)
            return [
                *("--use-rope-scaling", "--rope-scaling-factor", str(float(said["factor"]))),
                *("--rope-low-freq-factor", str(float(low))),
                *("--rope-high-freq-factor", str(float(high))),
                *("--rope-original-max-position-embeddings", str(int(length))),
            ]
    raise CheckpointError(
        f"config.json: there is no flag for rotary positions of the kind {said}; known are "
        f"default, linear, and llama3 with {', '.join(_LLAMA_3)}"
    )
