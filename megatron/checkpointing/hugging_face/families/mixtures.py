"""Mixtures of experts: Mixtral, Qwen-MoE, and DeepSeekMoE without latent attention.

DeepSeekMoE has many narrow experts and shared ones; sigmoid scores, plus a bias that has no gradient,
choose the experts (arXiv:2412.19437, section 2.1.2). dots.llm1 is such a network with norms of
queries and keys, GLM-4.5 one with rotary positions of a part of each head.
"""

from operator import attrgetter
from typing import Any

from megatron.checkpointing.expressed import Allowed
from megatron.checkpointing.hugging_face.families.family import (
    Family,
    HuggingFaceConfig,
    Modules,
    Table,
)
from megatron.checkpointing.hugging_face.families.llama import (
    ATTENTION,
    KEYS,
    MLP,
    NAMES,
    attention_bias_values,
    common_needs,
    common_values,
    window_above_values,
    window_or_none,
    window_values,
)
from megatron.checkpointing.hugging_face.families.tensor_mapping import (
    ExpertMatrices,
    ExpertsGateUp,
    GateUp,
)
from megatron.common.errors import CheckpointError
from megatron.config.network.experts import MoESpec
from megatron.config.network.model_spec import ModelSpec
from megatron.config.parsing.files import Values

_SCORED_PER_GROUP = 2  # best experts of a group whose sum is its score


def num_experts(spec: ModelSpec) -> int:
    """Return the experts of the layers that have some; 2 for a network without experts."""
    return max((2, *spec.part(MoESpec).num_experts))


def dense_layers(spec: ModelSpec) -> list[int]:
    """Return the layers with an ordinary MLP, counted from 0."""
    return [number for number, count in enumerate(spec.part(MoESpec).num_experts) if count == 1]


def layers_with_experts(spec: ModelSpec, dense: list[int]) -> tuple[int, ...]:
    """Return the experts of each layer, 1 in the `dense` ones, which are counted from 0."""
    return tuple(1 if number in dense else num_experts(spec) for number in range(spec.num_layers))


def _needs(spec: ModelSpec) -> Allowed:
    return {
        **common_needs(spec),
        "attention_output_bias": (False,),
        "num_experts": (layers_with_experts(spec, dense_layers(spec)),),
    }


def _mixtral_needs(spec: ModelSpec) -> Allowed:
    needs: Allowed = {"window": None, "full_attention_layers": ((),), "router_normalises": (True,)}
    return {**_needs(spec), **needs, "num_experts": (layers_with_experts(spec, []),)}


def _qwen2_needs(spec: ModelSpec) -> Allowed:
    needs: Allowed = {"qkv_bias": (True,), "shared_expert_gate": (True,)}
    return {**_needs(spec), **needs, "router_normalises": None}


def _qwen3_needs(spec: ModelSpec) -> Allowed:
    anything = dict.fromkeys(("attention_output_bias", "router_normalises"))
    return {**_needs(spec), **anything, "qk_layernorm": (True,)}


def group_needs(spec: ModelSpec, best: int) -> Allowed:
    """Return the values of routing by groups, whose score is the sum of that of their `best` experts."""
    moe = spec.part(MoESpec)
    is_share = best * moe.router_groups_per_token == moe.experts_per_token
    return {
        "router_groups": None,
        "router_groups_per_token": None,
        "router_group_best": (0 if is_share or not moe.router_groups else best,),
    }


def deepseek_needs(spec: ModelSpec) -> Allowed:
    """Return the values of DeepSeek-V3's mixture, with ordinary layers in front."""
    in_front = [*range(len(dense_layers(spec)))]
    return {
        **_needs(spec),
        "num_experts": (layers_with_experts(spec, in_front),),
        "shared_expert_ffn_hidden_size": (shared_experts(spec) * spec.expert_width,),
        "router_score": ("sigmoid",),
        "router_bias": (True,),
        "router_normalises": (True,),
        **group_needs(spec, _SCORED_PER_GROUP),
    }


def _dots_needs(spec: ModelSpec) -> Allowed:
    return {**deepseek_needs(spec), "attention_output_bias": None, "qk_layernorm": (True,)}


def _glm_needs(spec: ModelSpec) -> Allowed:
    anything = dict.fromkeys(("hidden_size", "qkv_bias", "qk_layernorm", "rotary_dim"))
    return {**deepseek_needs(spec), **anything}


def shared_experts(spec: ModelSpec) -> int:
    """Return the number of shared experts, each as wide as a routed one."""
    return max(spec.part(MoESpec).shared_expert_ffn_hidden_size // spec.expert_width, 1)


def mixture_values(config: HuggingFaceConfig, experts: int, dense: list[int]) -> dict[str, Any]:
    """Return the settings of the layers with experts, and of attention and MLPs without biases."""
    values = {**common_values(config), "num_experts": experts}
    if dense:
        layers = range(config["num_hidden_layers"])
        pattern = ",".join(str(int(number not in dense)) for number in layers)
        values["moe_layer_freq"] = f"[{pattern}]"
    if width := config.get("moe_intermediate_size"):
        values["moe_ffn_hidden_size"] = width
    return values


def _mixtral_values(config: HuggingFaceConfig) -> Values:
    return {
        **mixture_values(config, config["num_local_experts"], []),
        "ffn_hidden_size": config["intermediate_size"],
        "disable_bias_linear": True,
        "moe_router_score_function": "softmax",
        **window_values(config.get("sliding_window"), ["sliding_attention"]),
    }


def _qwen_values(config: HuggingFaceConfig) -> Values:
    layers, step = range(config["num_hidden_layers"]), config.get("decoder_sparse_step", 1)
    ordinary = config.get("mlp_only_layers") or ()
    dense = [number for number in layers if number in ordinary or (number + 1) % step]
    experts = config.get("num_experts") or config["num_local_experts"]
    if config.get("use_sliding_window"):
        raise CheckpointError("config.json: use_sliding_window is true; it is not imported")
    return {
        **mixture_values(config, experts, dense),
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not config.get("norm_topk_prob"),
    }


def _qwen2_values(config: HuggingFaceConfig) -> Values:
    fixed = dict.fromkeys(("disable_bias_linear", "add_qkv_bias", "moe_shared_expert_gate"), True)
    return {**_qwen_values(config), **fixed}


def _qwen3_values(config: HuggingFaceConfig) -> Values:
    return {**_qwen_values(config), "qk_layernorm": True, **attention_bias_values(config)}


def deepseek_values(config: HuggingFaceConfig) -> Values:
    """Return the settings of DeepSeek-V3's mixture."""
    dense = [*range(config.get("first_k_dense_replace") or 0)]
    shared = (config.get("n_shared_experts") or 0) * config["moe_intermediate_size"]
    values = {
        **mixture_values(config, config["n_routed_experts"], dense),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": shared,
    }
    return {**values, **group_values(config, _SCORED_PER_GROUP)}


def group_values(config: HuggingFaceConfig, best: int) -> Values:
    """Return the settings of routing by groups, whose score is the sum of that of their `best` experts."""
    if (config.get("n_group") or 1) == 1:
        return {}
    return {
        "moe_router_num_groups": config["n_group"],
        "moe_router_group_topk": config["topk_group"],
        "moe_router_group_best": best,
    }


def _dots_values(config: HuggingFaceConfig) -> Values:
    window = window_above_values(config.get("sliding_window"), config)
    biases = attention_bias_values(config)
    return {**deepseek_values(config), "qk_layernorm": True, **biases, **window}


def _glm_values(config: HuggingFaceConfig) -> Values:
    return {
        **deepseek_values(config),
        "disable_bias_linear": True,
        "qk_layernorm": bool(config.get("use_qk_norm")),
        "add_qkv_bias": bool(config.get("attention_bias")),
    }


def _expert_table(block: str, gate: str, up: str, down: str) -> Table:
    """Return the modules of routers and experts, by the names of one expert's matrices."""
    each = f"{block}.experts.{{}}."
    return {
        "mlp.router": f"{block}.gate",
        "mlp.experts.dense_h_to_4h": Modules((each + gate, each + up), lambda _: ExpertsGateUp()),
        "mlp.experts.dense_4h_to_h": Modules((each + down,), lambda _: ExpertMatrices()),
    }


def shared_table(module: str) -> Table:
    """Return the modules of the shared experts."""
    return {
        "mlp.shared_experts.dense_h_to_4h": Modules(
            (f"mlp.{module}.gate_proj", f"mlp.{module}.up_proj"), lambda _: GateUp()
        ),
        "mlp.shared_experts.dense_4h_to_h": f"mlp.{module}.down_proj",
    }


def module_names(*tables: Table, attention: Table = ATTENTION) -> dict[str, Any]:
    """Return the modules of a network whose layers have attention, an MLP, and what `tables` add."""
    norm = {"post_attention_layernorm": "post_attention_layernorm"}
    layer = {
        name: theirs for table in (attention, norm, MLP, *tables) for name, theirs in table.items()
    }
    return {**NAMES, "layer": layer}


ROUTED = _expert_table("mlp", "gate_proj", "up_proj", "down_proj")
_KEYS: dict[str, Any] = {
    **KEYS,
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": attrgetter("expert_width"),
    "norm_topk_prob": lambda spec: spec.part(MoESpec).router_normalises,
}
_QWEN_KEYS: dict[str, Any] = {
    **_KEYS,
    "num_experts": num_experts,
    "decoder_sparse_step": lambda _: 1,
    "mlp_only_layers": dense_layers,
    "use_sliding_window": lambda _: False,
}
DEEPSEEK_KEYS: dict[str, Any] = {
    **_KEYS,
    "n_routed_experts": num_experts,
    "n_shared_experts": shared_experts,
    "routed_scaling_factor": "router_scale",
    "n_group": lambda spec: spec.part(MoESpec).router_groups or 1,
    "topk_group": lambda spec: spec.part(MoESpec).router_groups_per_token or 1,
    "first_k_dense_replace": lambda spec: len(dense_layers(spec)),
}
EXPERT_BIAS: Table = {"mlp.router.expert_bias": "mlp.gate.e_score_correction_bias"}
_DEEPSEEK_NAMES = module_names(
    ROUTED,
    EXPERT_BIAS,
    shared_table("shared_experts"),
)

PREDICTION: Table = {
    **{name: name for name in ("enorm", "hnorm", "eh_proj")},
    "final_layernorm": "shared_head.norm",
}
"""Modules of a layer of multi-token prediction besides the transformer layer; see Family."""

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    keys={
        **KEYS,
        "intermediate_size": attrgetter("expert_width"),
        "sliding_window": window_or_none,
        "num_local_experts": num_experts,
        "num_experts_per_tok": "experts_per_token",
    },
    values_of=_mixtral_values,
    needs=_mixtral_needs,
    **module_names(_expert_table("block_sparse_moe", "w1", "w3", "w2")),
)
QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    keys={**_QWEN_KEYS, "shared_expert_intermediate_size": "shared_expert_ffn_hidden_size"},
    values_of=_qwen2_values,
    needs=_qwen2_needs,
    **module_names(
        ROUTED,
        shared_table("shared_expert"),
        {"mlp.shared_expert_gate": "mlp.shared_expert_gate"},
    ),
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    keys={**_QWEN_KEYS, "attention_bias": attrgetter("attention_output_bias")},
    values_of=_qwen3_values,
    needs=_qwen3_needs,
    **module_names(ROUTED),
)
DOTS1 = Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    keys={
        **DEEPSEEK_KEYS,
        "attention_bias": attrgetter("attention_output_bias"),
        "sliding_window": window_or_none,
    },
    values_of=_dots_values,
    needs=_dots_needs,
    **_DEEPSEEK_NAMES,
)
GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    keys={
        **DEEPSEEK_KEYS,
        "attention_bias": attrgetter("attention.qkv_bias"),
        "use_qk_norm": attrgetter("norm.qk_layernorm"),
        "partial_rotary_factor": lambda spec: spec.positions.rotary_dim / spec.attention.head_dim,
        "num_nextn_predict_layers": "prediction_depths",
    },
    values_of=_glm_values,
    needs=_glm_needs,
    prediction=PREDICTION,
    **_DEEPSEEK_NAMES,
)
