"""Mamba-2 and Nemotron-H of transformers."""

from operator import attrgetter
from typing import Any

from megatron.checkpointing.expressed import Allowed
from megatron.checkpointing.hugging_face.families.family import (
    LEFT_OUT,
    PLAIN_ACTIVATIONS,
    Family,
    HuggingFaceConfig,
    Modules,
    Table,
    activation_name,
    activation_values,
    bias_values,
)
from megatron.checkpointing.hugging_face.families.llama import group_values, qkv_mapping
from megatron.checkpointing.hugging_face.families.mixtures import group_needs
from megatron.checkpointing.hugging_face.families.mixtures import group_values as expert_groups
from megatron.checkpointing.hugging_face.families.tensor_mapping import ExpertMatrices
from megatron.common.errors import CheckpointError
from megatron.common.registry import FAMILIES
from megatron.config.network.experts import MoESpec
from megatron.config.network.model_spec import ModelSpec, flat, names_of
from megatron.config.parsing.files import Values
from megatron.extensions.hybrid.checkpoints_qwen3_next import QWEN3_NEXT
from megatron.extensions.hybrid.flags import HybridSpec
from megatron.extensions.hybrid.pattern import EXPERTS, MAMBA
from megatron.extensions.hybrid.tensor_mappings import ConvolutionWeight, Experts, GroupedRows

_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLDER_KINDS = {"mamba": "M", "attention": "*"}
_SCORED_PER_GROUP = 2  # best experts of a group whose sum is its score


def _hybrid_needs(spec: ModelSpec) -> Allowed:
    """Return the values that these architectures have in common: sizes of recurrent layers, no positions."""
    return {
        "architecture": ("hybrid",),
        **dict.fromkeys(names_of(HybridSpec)),
        "attention_output_gate": (False,),
        "position_embedding": ("none",),
        "normalization": ("RMSNorm",),
        "layernorm_1p": (False,),
        **dict.fromkeys(("num_query_groups", "head_dim", "hidden_size", "linear_bias")),
        "attention_output_bias": (False,),
        "qkv_bias": (False,),
    }


def _fixed_values(pattern: str) -> dict[str, Any]:
    """Return the settings that these architectures have in common."""
    return {
        **{"network": "hybrid", "hybrid_layer_pattern": pattern, "num_layers": len(pattern)},
        **{"position_embedding_type": "none", "normalization": "RMSNorm", "hidden_dropout": 0},
    }


def _require(config: HuggingFaceConfig, **values: Any) -> None:
    """Refuse a config.json whose options have other values."""
    for name, value in values.items():
        if config.get(name, value) != value:
            raise CheckpointError(f"config.json: {name} is {config[name]}; only {value} is built")


def _pattern_of(spec: ModelSpec) -> str:
    return spec.part(HybridSpec).hybrid_layer_pattern


def _input_rows(spec: ModelSpec) -> GroupedRows:
    """Return the mapping of {gate, x, B, C, dt}."""
    features, states, heads = _group_sizes(spec)
    groups = spec.part(HybridSpec).mamba_num_groups
    return GroupedRows(groups, (features, features, states, states, heads))


def _channels(spec: ModelSpec) -> GroupedRows:
    """Return the mapping of {x, B, C}."""
    features, states, _ = _group_sizes(spec)
    return GroupedRows(spec.part(HybridSpec).mamba_num_groups, (features, states, states))


def _convolution(spec: ModelSpec) -> ConvolutionWeight:
    rows = _channels(spec)
    return ConvolutionWeight(rows.groups, rows.sizes)


def _group_sizes(spec: ModelSpec) -> tuple[int, int, int]:
    """Return the features of a group's heads, the states of a feature, and the heads."""
    hybrid = spec.part(HybridSpec)
    heads = hybrid.mamba_num_heads // max(1, hybrid.mamba_num_groups)
    return heads * hybrid.mamba_head_dim, hybrid.mamba_state_dim, heads


_MAMBA: Table = {
    "input_layernorm": "norm",
    "pre_mlp_layernorm": "norm",
    "mixer": "mixer",
    "mixer.in_proj": Modules(("mixer.in_proj",), _input_rows),
    "mixer.convolution.weight": Modules(("mixer.conv1d.weight",), _convolution),
    "mixer.convolution.bias": Modules(("mixer.conv1d.bias",), _channels),
    "mixer.norm": "mixer.norm",
    "mixer.out_proj": "mixer.out_proj",
}
_ATTENTION_AND_MLP: Table = {
    "self_attention.query_key_value": Modules(
        ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"), qkv_mapping
    ),
    "self_attention.dense": "mixer.o_proj",
    "mlp.dense_h_to_4h": "mixer.up_proj",
    "mlp.dense_4h_to_h": "mixer.down_proj",
    "mlp.router": "mixer.gate",
    "mlp.router.expert_bias": "mixer.gate.e_score_correction_bias",
    "mlp.experts.dense_h_to_4h": Modules(("mixer.experts.{}.up_proj",), lambda _: Experts()),
    "mlp.experts.dense_4h_to_h": Modules(
        ("mixer.experts.{}.down_proj",), lambda _: ExpertMatrices()
    ),
    "mlp.shared_experts.dense_h_to_4h": "mixer.shared_experts.up_proj",
    "mlp.shared_experts.dense_4h_to_h": "mixer.shared_experts.down_proj",
}
_NAMES: dict[str, Any] = {
    "of_network": "hybrid",
    "layers": "backbone.layers.{}.",
    "network": {
        "embedding.word_embeddings": "backbone.embeddings",
        "final_layernorm": "backbone.norm_f",
        "output_layer": "lm_head",
    },
}


def _mamba_needs(spec: ModelSpec) -> Allowed:
    return {
        **_hybrid_needs(spec),
        "hybrid_layer_pattern": (MAMBA * spec.num_layers,),
        "mamba_num_heads": _heads_that_expand(spec),
        "mamba_dt_min": (0.0,),
        # Of attention and MLPs, which it lacks.
        "activation": None,
    }


def _heads_that_expand(spec: ModelSpec) -> tuple[int, ...]:
    """Return the number of heads if their features are a multiple of the hidden size, else none."""
    hybrid = spec.part(HybridSpec)
    inner = hybrid.mamba_num_heads * hybrid.mamba_head_dim
    return () if inner % spec.hidden_size else (hybrid.mamba_num_heads,)


def _mamba_values(config: HuggingFaceConfig) -> Values:
    _require(config, use_bias=False, use_conv_bias=True, hidden_act="silu")
    _require(config, time_step_limit=[0.0, float("inf")])
    return {
        **_fixed_values(MAMBA * config["num_hidden_layers"]),
        # Sizes of attention, which it lacks; they divide whatever heads do.
        **{"num_attention_heads": config["num_heads"], "kv_channels": config["head_dim"]},
        **{"attention_dropout": 0, "disable_bias_linear": True},
    }


MAMBA2 = Family(
    model_type="mamba2",
    architecture="Mamba2ForCausalLM",
    keys={
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "num_heads": "mamba_num_heads",
        "head_dim": "mamba_head_dim",
        "state_size": "mamba_state_dim",
        "n_groups": "mamba_num_groups",
        "conv_kernel": "linear_conv_kernel_dim",
        "layer_norm_epsilon": "norm_epsilon",
        "expand": lambda spec: (
            _group_sizes(spec)[0] * spec.part(HybridSpec).mamba_num_groups // spec.hidden_size
        ),
    },
    values_of=_mamba_values,
    needs=_mamba_needs,
    layer=_MAMBA,
    **_NAMES,
)


def _nemotron_needs(spec: ModelSpec) -> Allowed:
    has_experts = EXPERTS in _pattern_of(spec)
    needs = {
        **_hybrid_needs(spec),
        "hybrid_layer_pattern": None if "G" not in _pattern_of(spec) else (),
        "activation": PLAIN_ACTIVATIONS,
        "tied_embeddings": (False,),
    }
    if not has_experts:
        return needs
    return {
        **needs,
        "linear_bias": (False,),
        **dict.fromkeys(("num_experts", "router_normalises", "router_scale")),
        "router_score": ("sigmoid",),
        "router_bias": (True,),
        "shared_expert_ffn_hidden_size": (
            max(1, spec.part(MoESpec).shared_expert_ffn_hidden_size),
        ),
        **group_needs(spec, _SCORED_PER_GROUP),
    }


def _nemotron_values(config: HuggingFaceConfig) -> Values:
    _require(config, use_bias=False, use_conv_bias=True, mamba_hidden_act="silu")
    _require(config, mamba_proj_bias=False, attention_bias=False, moe_latent_size=None)
    letters = {kind: letter for letter, kind in _KINDS.items()} | _OLDER_KINDS
    unknown = {*config["layers_block_type"]} - letters.keys()
    if unknown:
        raise CheckpointError(
            f"config.json: layers_block_type has {', '.join(sorted(unknown))}; known are "
            f"{', '.join(letters)}"
        )
    pattern = "".join(letters[kind] for kind in config["layers_block_type"])
    experts: dict[str, Any] = {}
    if EXPERTS in pattern:
        experts = {
            "num_experts": config["n_routed_experts"],
            "moe_router_topk": config["num_experts_per_tok"],
            "moe_ffn_hidden_size": config["moe_intermediate_size"],
            "moe_shared_expert_intermediate_size": config["moe_shared_expert_intermediate_size"],
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": config["routed_scaling_factor"],
            **expert_groups(config, _SCORED_PER_GROUP),
        }
    return {
        **_fixed_values(pattern),
        **group_values(config),
        **activation_values(config["mlp_hidden_act"], gated=False),
        **bias_values(attention=False, mlp=config["mlp_bias"]),
        **experts,
    }


def _of_experts(name: str) -> Any:
    """Return the entry of a field of experts, left out of networks without them."""
    return lambda spec: flat(spec)[name] if EXPERTS in _pattern_of(spec) else LEFT_OUT


NEMOTRON_H = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    module_prefix="model.",
    keys={
        "layers_block_type": lambda spec: [_KINDS[kind] for kind in _pattern_of(spec)],
        "hidden_size": "hidden_size",
        "intermediate_size": "ffn_hidden_size",
        "num_attention_heads": "num_attention_heads",
        "num_key_value_heads": attrgetter("attention.num_query_groups"),
        "head_dim": "head_dim",
        "max_position_embeddings": "max_position_embeddings",
        "attention_dropout": "attention_dropout",
        "mlp_hidden_act": activation_name,
        "mlp_bias": attrgetter("mlp.linear_bias"),
        "layer_norm_epsilon": "norm_epsilon",
        "mamba_num_heads": "mamba_num_heads",
        "mamba_head_dim": "mamba_head_dim",
        "ssm_state_size": "mamba_state_dim",
        "n_groups": "mamba_num_groups",
        "conv_kernel": "linear_conv_kernel_dim",
        "time_step_min": "mamba_dt_min",
        "n_routed_experts": lambda spec: max(spec.part(MoESpec).num_experts, default=LEFT_OUT),
        "num_experts_per_tok": _of_experts("experts_per_token"),
        "moe_intermediate_size": lambda spec: (
            spec.expert_width if EXPERTS in _pattern_of(spec) else LEFT_OUT
        ),
        "moe_shared_expert_intermediate_size": _of_experts("shared_expert_ffn_hidden_size"),
        "routed_scaling_factor": _of_experts("router_scale"),
        "norm_topk_prob": _of_experts("router_normalises"),
        "n_group": lambda spec: spec.part(MoESpec).router_groups or 1,
        "topk_group": lambda spec: spec.part(MoESpec).router_groups_per_token or 1,
    },
    values_of=_nemotron_values,
    needs=_nemotron_needs,
    layer={**_MAMBA, **_ATTENTION_AND_MLP},
    ignored=(r"mtp\.",),
    **_NAMES,
)


@FAMILIES.register("hybrids")
def hybrids() -> tuple[Family, ...]:
    """Return the architectures of hybrid networks."""
    return (MAMBA2, NEMOTRON_H, QWEN3_NEXT)
