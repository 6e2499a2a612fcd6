"""MiniCPM3: latent attention as DeepSeek-V2's, with the multipliers of Granite by other names."""

import math
from typing import Any

from megatron.checkpointing.expressed import Allowed
from megatron.checkpointing.hugging_face.families.family import Family, HuggingFaceConfig
from megatron.checkpointing.hugging_face.families.latent import (
    LATENT_KEYS,
    latent_needs,
    latent_table,
    latent_values,
)
from megatron.checkpointing.hugging_face.families.llama import KEYS, common_needs, common_values
from megatron.checkpointing.hugging_face.families.mixtures import module_names
from megatron.config.network.model_spec import ModelSpec
from megatron.config.parsing.files import Values


def _needs(spec: ModelSpec) -> Allowed:
    multipliers = ("embedding_multiplier", "residual_multiplier", "logit_divisor")
    return {
        **common_needs(spec),
        **latent_needs(spec),
        **dict.fromkeys(multipliers),
        "attention_output_bias": (False,),
        "num_query_groups": (spec.attention.num_attention_heads,),
        "query_scalar": (0.0,),
    }


def _values(config: HuggingFaceConfig) -> Values:
    return {
        **common_values(config),
        **latent_values(config),
        "residual_multiplier": config["scale_depth"] / math.sqrt(config["num_hidden_layers"]),
        "logits_scaling": config["hidden_size"] / config["dim_model_base"],
    }


def _depth_scale(spec: ModelSpec) -> float:
    """Return the multiplier of residuals times the root of the layers, without its rounding."""
    return float(f"{spec.residual_multiplier * math.sqrt(spec.num_layers):.12g}")


_KEYS: dict[str, Any] = {
    **{key: entry for key, entry in KEYS.items() if key != "head_dim"},
    **LATENT_KEYS,
    "scale_emb": "embedding_multiplier",
    "scale_depth": _depth_scale,
    "dim_model_base": lambda spec: float(
        f"{spec.hidden_size / spec.vocabulary.logit_divisor:.12g}"
    ),
}

MINICPM3 = Family(
    model_type="minicpm3",
    architecture="MiniCPM3ForCausalLM",
    keys=_KEYS,
    values_of=_values,
    needs=_needs,
    **module_names(attention=latent_table(are_neighbors=False)),
)
