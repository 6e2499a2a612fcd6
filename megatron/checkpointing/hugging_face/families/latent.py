"""Networks with multi-head latent attention (MLA): DeepSeek-V2 and V3, whose class Kimi K2 has, GLM-4.7-Flash.

DeepSeek-V2 chooses groups of experts by their best expert, V3 by the sum of the best two.
"""

import math
from operator import attrgetter
from typing import Any

from megatron.checkpointing.expressed import Allowed
from megatron.checkpointing.hugging_face.families.family import (
    Family,
    HuggingFaceConfig,
    Modules,
    Table,
)
from megatron.checkpointing.hugging_face.families.llama import attention_bias_values
from megatron.checkpointing.hugging_face.families.mixtures import (
    DEEPSEEK_KEYS,
    EXPERT_BIAS,
    PREDICTION,
    ROUTED,
    deepseek_needs,
    deepseek_values,
    dense_layers,
    group_needs,
    group_values,
    layers_with_experts,
    mixture_values,
    module_names,
    shared_table,
)
from megatron.checkpointing.hugging_face.families.rotary import rope_scaling_config
from megatron.checkpointing.hugging_face.families.tensor_mapping import TurnedRows
from megatron.config.network.latent import LatentSpec, yarn_scale
from megatron.config.network.model_spec import ModelSpec
from megatron.config.parsing.files import Values

_LATENT_EPSILON = 1e-6  # of the classes' norms of latents, whatever rms_norm_eps is


def _turned(spec: ModelSpec) -> int:
    return spec.part(LatentSpec).qk_pos_emb_head_dim


def _plain(spec: ModelSpec) -> int:
    return spec.attention.head_dim - _turned(spec)


def latent_needs(spec: ModelSpec) -> Allowed:
    """Return the values of latent attention, with norms of latents and YaRN's scale of scores."""
    is_scaled = spec.positions.rope_rule == "yarn" and spec.positions.rope_scaling != 1
    return {
        **dict.fromkeys(("hidden_size", "attention_output_bias", "rotary_dim", "head_dim")),
        **dict.fromkeys(("q_lora_rank", "v_head_dim")),
        "kv_lora_rank": (spec.part(LatentSpec).kv_lora_rank or 512,),
        "qk_pos_emb_head_dim": None,
        "latent_norm_epsilon": (_LATENT_EPSILON,),
        "qk_layernorm": (True,),
        "qkv_bias": (spec.attention_output_bias,),
        "query_scalar": None if is_scaled else (0.0,),
    }


def latent_values(config: HuggingFaceConfig) -> dict[str, Any]:
    """Return the settings of latent attention."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    scales: dict[str, Any] = {}
    if rope.get("mscale_all_dim") and rope.get("rope_type", rope.get("type")) == "yarn":
        scales = {"mscale_all_dim": float(rope["mscale_all_dim"])}
        if not rope.get("mscale") and rope.get("attention_factor") is None:
            length = rope.get("original_max_position_embeddings")
            factor = rope.get("factor") or config["max_position_embeddings"] / length
            scales["rope_attention_factor"] = yarn_scale(factor, 1.0)
    return {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "qk_head_dim": config["qk_nope_head_dim"],
        **({"q_lora_rank": config["q_lora_rank"]} if config.get("q_lora_rank") else {}),
        "attention_latent_norm_epsilon": _LATENT_EPSILON,
        **attention_bias_values(config),
        **scales,
    }


def _rope_scaling(spec: ModelSpec) -> dict[str, Any] | None:
    """Build `rope_scaling` of config.json, with the scale of scores."""
    rope, scalar = rope_scaling_config(spec), spec.attention.query_scalar
    if rope is None or not scalar:
        return rope
    scale = (spec.attention.head_dim / scalar) ** 0.25
    share = (scale - 1) / (0.1 * math.log(spec.positions.rope_scaling))
    return {**rope, "mscale_all_dim": round(share, 9)}


LATENT_KEYS: dict[str, Any] = {
    "q_lora_rank": lambda spec: spec.part(LatentSpec).q_lora_rank or None,
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": _plain,
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
    "rope_scaling": _rope_scaling,
    "attention_bias": attrgetter("attention_output_bias"),
}
"""Entries of config.json of latent attention; see Family.keys."""


def latent_table(*, are_neighbors: bool = True) -> Table:
    """Return the modules of latent attention in a layer; see Family.

    Args:
        are_neighbors: whether transformers turns neighboring features.
    """

    def queries(spec: ModelSpec) -> TurnedRows:
        heads = spec.attention.num_attention_heads
        return TurnedRows(
            groups=heads, turned=_turned(spec), is_first=True, are_neighbors=are_neighbors
        )

    def keys(spec: ModelSpec) -> TurnedRows:
        return TurnedRows(
            groups=1, turned=_turned(spec), is_first=False, are_neighbors=are_neighbors
        )

    return {
        "input_layernorm": "input_layernorm",
        "self_attention.query": Modules(("self_attn.q_proj",), queries),
        "self_attention.q_down": "self_attn.q_a_proj",
        "self_attention.q_layernorm": "self_attn.q_a_layernorm",
        "self_attention.q_up": Modules(("self_attn.q_b_proj",), queries),
        "self_attention.kv_down": Modules(("self_attn.kv_a_proj_with_mqa",), keys),
        "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
        "self_attention.kv_up": "self_attn.kv_b_proj",
        "self_attention.dense": "self_attn.o_proj",
    }


def _v2_needs(spec: ModelSpec) -> Allowed:
    return {
        **deepseek_needs(spec),
        **latent_needs(spec),
        **group_needs(spec, 1),
        "router_score": ("softmax",),
        "router_bias": (False,),
        "router_normalises": (False,),
    }


def _v2_values(config: HuggingFaceConfig) -> Values:
    dense = [*range(config.get("first_k_dense_replace") or 0)]
    shared = (config.get("n_shared_experts") or 0) * config["moe_intermediate_size"]
    in_groups = config.get("topk_method") == "group_limited_greedy"
    return {
        **mixture_values(config, config["n_routed_experts"], dense),
        **latent_values(config),
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
        "moe_shared_expert_intermediate_size": shared,
        **(group_values(config, 1) if in_groups else {}),
    }


def _topk_method(spec: ModelSpec) -> str:
    return "group_limited_greedy" if DEEPSEEK_KEYS["n_group"](spec) > 1 else "greedy"


def _v3_needs(spec: ModelSpec) -> Allowed:
    return {**deepseek_needs(spec), **latent_needs(spec)}


def _v3_values(config: HuggingFaceConfig) -> Values:
    return {**deepseek_values(config), **latent_values(config)}


def _lite_needs(spec: ModelSpec) -> Allowed:
    layers = layers_with_experts(spec, dense_layers(spec))
    return {**_v3_needs(spec), "num_experts": (layers,)}


def _lite_values(config: HuggingFaceConfig) -> Values:
    kinds = config["mlp_layer_types"]
    dense = [number for number, kind in enumerate(kinds) if kind == "dense"]
    in_front = {**config, "first_k_dense_replace": len(dense)}
    return {**_v3_values(in_front), **mixture_values(config, config["n_routed_experts"], dense)}


def _mlp_kinds(spec: ModelSpec) -> list[str]:
    dense = dense_layers(spec)
    return ["dense" if number in dense else "sparse" for number in range(spec.num_layers)]


_KEYS: dict[str, Any] = {**DEEPSEEK_KEYS, **LATENT_KEYS}
del _KEYS["head_dim"]
_NAMES = module_names(ROUTED, EXPERT_BIAS, shared_table("shared_experts"), attention=latent_table())
_V3_KEYS: dict[str, Any] = {
    **_KEYS,
    "rope_interleave": True,
    "num_nextn_predict_layers": "prediction_depths",
}
_LITE_KEYS = {key: entry for key, entry in _V3_KEYS.items() if key != "first_k_dense_replace"}

DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    keys={**_KEYS, "topk_method": _topk_method},
    values_of=_v2_values,
    needs=_v2_needs,
    **_NAMES,
)
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    keys=_V3_KEYS,
    values_of=_v3_values,
    needs=_v3_needs,
    prediction=PREDICTION,
    **_NAMES,
)
GLM4_MOE_LITE = Family(
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    keys={**_LITE_KEYS, "mlp_layer_types": _mlp_kinds},
    values_of=_lite_values,
    needs=_lite_needs,
    prediction=PREDICTION,
    **_NAMES,
)
