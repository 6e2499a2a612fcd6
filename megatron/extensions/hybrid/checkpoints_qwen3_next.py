"""Qwen3-Next of transformers: blocks of Gated DeltaNet or gated attention, and of experts or an MLP.

A layer there is two layers here: one that mixes tokens, and one of experts or an MLP.
"""

from operator import attrgetter
from typing import Any

from megatron.checkpointing.expressed import Allowed
from megatron.checkpointing.hugging_face.families.family import (
    LEFT_OUT,
    Family,
    HuggingFaceConfig,
    Modules,
)
from megatron.checkpointing.hugging_face.families.llama import (
    ATTENTION,
    KEYS,
    MLP,
    NAMES,
    common_needs,
    common_values,
)
from megatron.checkpointing.hugging_face.families.mixtures import ROUTED, shared_table
from megatron.checkpointing.hugging_face.families.rotary import rope_scaling_config
from megatron.common.errors import CheckpointError
from megatron.config.network.experts import MoESpec
from megatron.config.network.model_spec import ModelSpec, names_of
from megatron.config.parsing.files import Values
from megatron.extensions.hybrid.flags import HybridSpec
from megatron.extensions.hybrid.pattern import ATTENTION as FULL
from megatron.extensions.hybrid.pattern import DELTA_NET, EXPERTS
from megatron.extensions.hybrid.pattern import MLP as DENSE
from megatron.extensions.hybrid.tensor_mappings import (
    ConvolutionWeight,
    GatedQueriesKeysValues,
    SplitGroups,
)

_KINDS = {DELTA_NET: "linear_attention", FULL: "full_attention"}


def _pattern_of(spec: ModelSpec) -> str:
    return spec.part(HybridSpec).hybrid_layer_pattern


def _is_of_blocks(pattern: str) -> bool:
    """Whether each layer that mixes tokens is followed by one of experts or an MLP."""
    mixers, others = pattern[::2], pattern[1::2]
    return len(mixers) == len(others) and {*mixers} <= _KINDS.keys() and {*others} <= {*"-E"}


def _needs(spec: ModelSpec) -> Allowed:
    pattern = _pattern_of(spec)
    needs: dict[str, Any] = {
        **common_needs(spec),
        "architecture": ("hybrid",),
        **{name: None for name in names_of(HybridSpec) if not name.startswith("mamba_")},
        "hybrid_layer_pattern": (pattern,) if _is_of_blocks(pattern) else ("GEGEGE*E",),
        "attention_output_gate": (FULL in pattern,),
        **dict.fromkeys(("hidden_size", "rotary_dim")),
        "attention_output_bias": (False,),
        "layernorm_1p": (True,),
        "qk_layernorm": (True,),
        "activation": ("swiglu",),
    }
    if EXPERTS in pattern:
        needs |= {
            "num_experts": None,
            "router_normalises": None,
            "shared_expert_gate": (True,),
            "shared_expert_ffn_hidden_size": (
                max(1, spec.part(MoESpec).shared_expert_ffn_hidden_size),
            ),
        }
    return needs


def _values_of(config: HuggingFaceConfig) -> Values:
    layers, step = range(config["num_hidden_layers"]), config.get("decoder_sparse_step", 1)
    letters = {kind: letter for letter, kind in _KINDS.items()}
    if config.get("attention_bias"):
        raise CheckpointError("config.json: attention_bias is true; it is not imported")
    dense = config.get("mlp_only_layers") or ()
    pattern = "".join(
        letters[config["layer_types"][number]]
        + (DENSE if number in dense or (number + 1) % step else EXPERTS)
        for number in layers
    )
    values = {
        **common_values(config),
        **{"network": "hybrid", "hybrid_layer_pattern": pattern, "num_layers": len(pattern)},
        **{"apply_layernorm_1p": True, "qk_layernorm": True, "disable_bias_linear": True},
        "attention_output_gate": FULL in pattern,
    }
    if EXPERTS not in pattern:
        return values
    return {
        **values,
        "num_experts": config["num_experts"],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not config["norm_topk_prob"],
    }


def _of_experts(path: str) -> Any:
    """Return the entry of a value of experts, left out of networks without them."""
    return lambda spec: attrgetter(path)(spec) if EXPERTS in _pattern_of(spec) else LEFT_OUT


def _delta_rows(spec: ModelSpec) -> SplitGroups:
    """Return the mapping of {query, key, values, gates} and {beta, decay} of each key head."""
    hybrid, values = spec.part(HybridSpec), _values_of_key_head(spec)
    features = values * hybrid.linear_value_head_dim
    sizes = 2 * hybrid.linear_key_head_dim + 2 * features, 2 * values
    return SplitGroups(hybrid.linear_num_key_heads, sizes)


def _convolution(spec: ModelSpec) -> ConvolutionWeight:
    """Return the mapping of {query, key, values} of each key head."""
    hybrid = spec.part(HybridSpec)
    keys, values = hybrid.linear_key_head_dim, hybrid.linear_value_head_dim
    return ConvolutionWeight(
        hybrid.linear_num_key_heads, (keys, keys, _values_of_key_head(spec) * values)
    )


def _values_of_key_head(spec: ModelSpec) -> int:
    hybrid = spec.part(HybridSpec)
    return hybrid.linear_num_value_heads // hybrid.linear_num_key_heads


def _qkv(spec: ModelSpec) -> GatedQueriesKeysValues:
    groups = spec.attention.num_query_groups
    return GatedQueriesKeysValues(
        groups=groups,
        queries=spec.attention.num_attention_heads // groups,
        head_dim=spec.attention.head_dim,
    )


QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    of_network="hybrid",
    layers_in_one=2,
    keys={
        **KEYS,
        "num_hidden_layers": lambda spec: spec.num_layers // 2,
        "layer_types": lambda spec: [_KINDS[kind] for kind in _pattern_of(spec)[::2]],
        "rope_scaling": rope_scaling_config,
        "partial_rotary_factor": lambda spec: spec.positions.rotary_dim / spec.attention.head_dim,
        **{name: name for name in names_of(HybridSpec) if name.startswith("linear_")},
        "decoder_sparse_step": lambda _: 1,
        "mlp_only_layers": lambda spec: [
            number for number, kind in enumerate(_pattern_of(spec)[1::2]) if kind == DENSE
        ],
        "num_experts": lambda spec: max(spec.part(MoESpec).num_experts, default=LEFT_OUT),
        "num_experts_per_tok": _of_experts("moe.experts_per_token"),
        "moe_intermediate_size": _of_experts("expert_width"),
        "shared_expert_intermediate_size": _of_experts("moe.shared_expert_ffn_hidden_size"),
        "norm_topk_prob": _of_experts("moe.router_normalises"),
    },
    values_of=_values_of,
    needs=_needs,
    norms_around_one=True,
    ignored=(r"mtp\.",),
    **{
        **NAMES,
        "layer": {
            **ATTENTION,
            "self_attention.query_key_value": Modules(
                ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), _qkv
            ),
            "mixer": "linear_attn",
            "mixer.in_proj": Modules(
                ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"), _delta_rows
            ),
            "mixer.convolution.weight": Modules(("linear_attn.conv1d.weight",), _convolution),
            "mixer.norm_weight": "linear_attn.norm.weight",
            "mixer.out_proj": "linear_attn.out_proj",
            "pre_mlp_layernorm": "post_attention_layernorm",
            **MLP,
            **ROUTED,
            **shared_table("shared_expert"),
            "mlp.shared_expert_gate": "mlp.shared_expert_gate",
        },
    },
)
