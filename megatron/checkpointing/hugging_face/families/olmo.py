"""OLMo 2 and OLMo 3: norms of outputs alone, and norms of the queries and keys of all heads together.

OLMo 3 has layers with a window, whose rotary positions are never stretched.
"""

from operator import attrgetter
from typing import Any

from megatron.checkpointing.expressed import Allowed
from megatron.checkpointing.hugging_face.families.family import Family, HuggingFaceConfig
from megatron.checkpointing.hugging_face.families.gemma import (
    local_rotary_needs,
    local_rotary_values,
)
from megatron.checkpointing.hugging_face.families.llama import (
    ATTENTION,
    KEYS,
    MLP,
    NAMES,
    attention_bias_values,
    common_needs,
    common_values,
    layer_types,
    window_values,
)
from megatron.checkpointing.hugging_face.families.rotary import rope_scaling_config
from megatron.config.network.model_spec import ModelSpec
from megatron.config.parsing.files import Values


def _olmo2_needs(spec: ModelSpec) -> Allowed:
    return {
        **common_needs(spec),
        "sandwich_norm": (True,),
        "input_norm": (False,),
        "qk_layernorm": (True,),
        "qk_norm_across_heads": (True,),
    }


def _olmo3_needs(spec: ModelSpec) -> Allowed:
    return {**_olmo2_needs(spec), "window": None, **local_rotary_needs(spec)}


def _olmo2_values(config: HuggingFaceConfig) -> Values:
    return {
        **common_values(config),
        **attention_bias_values(config),
        **dict.fromkeys(("sandwich_norm", "qk_layernorm", "qk_layernorm_across_heads"), True),
        "input_norm": False,
    }


def _olmo3_values(config: HuggingFaceConfig) -> Values:
    return {
        **local_rotary_values(config, _olmo2_values),
        **window_values(config.get("sliding_window"), config["layer_types"]),
    }


def _rope_parameters(spec: ModelSpec) -> dict[str, Any]:
    """Return the rotary positions of both kinds of layers, as only newer versions have them."""
    rotary = spec.positions
    scaling = rope_scaling_config(spec) or {"rope_type": "default"}
    local = rotary.rotary_local_base or rotary.rotary_base
    return {
        "full_attention": {**scaling, "rope_theta": rotary.rotary_base},
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


_LAYER = {
    **ATTENTION,
    "attention_output_layernorm": "post_attention_layernorm",
    "mlp_output_layernorm": "post_feedforward_layernorm",
    **MLP,
}
_NAMES: dict[str, Any] = {
    **NAMES,
    "layer": {name: theirs for name, theirs in _LAYER.items() if name != "input_layernorm"},
}
_KEYS = {**KEYS, "attention_bias": attrgetter("attention_output_bias")}

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    keys=_KEYS,
    values_of=_olmo2_values,
    needs=_olmo2_needs,
    **_NAMES,
)
OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    keys={
        **_KEYS,
        "rope_parameters": _rope_parameters,
        # transformers needs a window also where no layer has it.
        "sliding_window": lambda spec: (
            spec.attention.window or spec.positions.max_position_embeddings
        ),
        "layer_types": layer_types,
    },
    values_of=_olmo3_values,
    needs=_olmo3_needs,
    **_NAMES,
)
