"""Gemma, Gemma 2 and Gemma 3: scaled embeddings, norms around 1.

Gemma 2 norms the outputs of attention and of the MLP too, bounds scores and logits, and gives every
second layer a window. Gemma 3 has norms of queries and keys in place of the bound of scores, and
other rotary positions in the layers with a window.
"""

from collections.abc import Callable
from typing import Any

from megatron.checkpointing.expressed import Allowed
from megatron.checkpointing.hugging_face.families.family import (
    Family,
    HuggingFaceConfig,
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
from megatron.common.errors import CheckpointError
from megatron.config.network.model_spec import ModelSpec
from megatron.config.parsing.files import Values


def _gemma_needs(spec: ModelSpec) -> Allowed:
    needs: Allowed = {"scaled_embedding": (True,), "layernorm_1p": (True,)}
    # Its config.json has "gelu" for the tanh form too.
    activations = ("geglu_tanh", "swiglu", "reglu", "liglu")
    return {**common_needs(spec), **needs, "activation": activations}


def _gemma2_needs(spec: ModelSpec) -> Allowed:
    needs: Allowed = {
        "activation": common_needs(spec)["activation"],
        "window": None,
        "sandwich_norm": (True,),
        "query_scalar": (float(int(spec.attention.query_scalar)),),
        "attention_softcap": None,
        "logit_softcap": None,
    }
    return {**_gemma_needs(spec), **needs}


def local_rotary_needs(spec: ModelSpec) -> Allowed:
    """Return the rotary positions of layers with a window, which are never stretched."""
    rotary = spec.positions
    is_stretched = rotary.rope_scaling != 1 or rotary.rotary_interpolation != 1
    local = rotary.rotary_local_base
    wanted = local or rotary.rotary_base if spec.attention.window and is_stretched else local
    return {"rotary_local_base": (wanted,)}


def _gemma3_needs(spec: ModelSpec) -> Allowed:
    needs: Allowed = {"qk_layernorm": (True,), "attention_softcap": (0.0,)}
    return {**_gemma2_needs(spec), **needs, **local_rotary_needs(spec)}


_GEMMA_KEYS = {
    **KEYS,
    "attention_bias": lambda spec: spec.attention_output_bias,
    "use_bidirectional_attention": False,
}
_GEMMA2_KEYS = {
    **{key: entry for key, entry in _GEMMA_KEYS.items() if key != "hidden_act"},
    "hidden_activation": KEYS["hidden_act"],
    "query_pre_attn_scalar": lambda spec: int(
        spec.attention.query_scalar or spec.attention.head_dim
    ),
    "attn_logit_softcapping": lambda spec: spec.attention.attention_softcap or None,
    "final_logit_softcapping": lambda spec: spec.vocabulary.logit_softcap or None,
    # transformers needs a window also where no layer has it.
    "sliding_window": lambda spec: spec.attention.window or spec.positions.max_position_embeddings,
    "layer_types": layer_types,
}
_GEMMA3_KEYS = {
    **_GEMMA2_KEYS,
    "rope_local_base_freq": lambda spec: (
        spec.positions.rotary_local_base or spec.positions.rotary_base
    ),
}


def _gemma_values(config: HuggingFaceConfig) -> Values:
    fixed = {"scale_embedding": True, "apply_layernorm_1p": True}
    return {**common_values(config), **attention_bias_values(config), **fixed}


def _gemma2_values(config: HuggingFaceConfig) -> Values:
    bounds = ("attn_logit_softcapping", "final_logit_softcapping")
    return {
        **_gemma_values({**config, "hidden_act": config["hidden_activation"]}),
        "sandwich_norm": True,
        "query_pre_attn_scalar": float(config["query_pre_attn_scalar"]),
        **{name: float(config[name]) for name in bounds if config.get(name)},
        **window_values(config.get("sliding_window"), config["layer_types"]),
    }


def _gemma3_values(config: HuggingFaceConfig) -> Values:
    return {**local_rotary_values(config, _gemma2_values), "qk_layernorm": True}


def local_rotary_values(
    config: HuggingFaceConfig, values_of: Callable[[HuggingFaceConfig], Values]
) -> Values:
    """Return the settings of a config with rotary positions for each kind of layer.

    Args:
        values_of: returns the settings of a config with one kind.

    Raises:
        CheckpointError: layers with a window have another kind than unscaled ones.
    """
    rotary = config["rope_parameters"]
    full, local = rotary["full_attention"], rotary["sliding_attention"]
    values = values_of({**config, "rope_parameters": full})
    if not config.get("sliding_window") or "sliding_attention" not in config["layer_types"]:
        return values
    if local.get("rope_type", "default") != "default":
        raise CheckpointError(
            f"config.json: there is no flag for rotary positions of the kind {local} in layers "
            "with a window"
        )
    return {**values, "rotary_local_base": float(local["rope_theta"])}


_NAMES: dict[str, Any] = {**NAMES, "norms_around_one": True}
_SANDWICH_NAMES: dict[str, Any] = {
    **_NAMES,
    "layer": {
        **ATTENTION,
        "attention_output_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "mlp_output_layernorm": "post_feedforward_layernorm",
        **MLP,
    },
}

GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    keys=_GEMMA_KEYS,
    values_of=_gemma_values,
    needs=_gemma_needs,
    **_NAMES,
)
GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    keys=_GEMMA2_KEYS,
    values_of=_gemma2_values,
    needs=_gemma2_needs,
    **_SANDWICH_NAMES,
)
GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    keys=_GEMMA3_KEYS,
    values_of=_gemma3_values,
    needs=_gemma3_needs,
    **_SANDWICH_NAMES,
)
