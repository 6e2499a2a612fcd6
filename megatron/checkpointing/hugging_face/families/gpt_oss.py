"""gpt-oss: a mixture of experts with attention sinks, windows in every other layer, and clamped gates.

Source: arXiv:2508.10925, section 2.
"""

from operator import attrgetter

from megatron.checkpointing.expressed import Allowed
from megatron.checkpointing.hugging_face.families.family import (
    Family,
    HuggingFaceConfig,
    Modules,
    bias_values,
)
from megatron.checkpointing.hugging_face.families.llama import (
    ATTENTION,
    KEYS,
    NAMES,
    common_needs,
    common_values,
    layer_types,
    window_above_values,
)
from megatron.checkpointing.hugging_face.families.mixtures import layers_with_experts, num_experts
from megatron.checkpointing.hugging_face.families.tensor_mapping import Transposed
from megatron.config.network.model_spec import ModelSpec
from megatron.config.parsing.files import Values

_SIGMOID_GAIN = 1.702  # of quick_geglu
_OFFSET = 1.0
_LIMIT, _WINDOW = 7.0, 128  # defaults of swiglu_limit and sliding_window


def _needs(spec: ModelSpec) -> Allowed:
    return {
        **common_needs(spec),
        "linear_bias": (True,),
        "window": None,
        "softmax_type": ("learnable",),
        "activation": ("quick_geglu",),
        "glu_clamp": (spec.mlp.glu_clamp or _LIMIT,),
        "glu_offset": (_OFFSET,),
        "num_experts": (layers_with_experts(spec, []),),
        "router_linear_bias": (True,),
        "router_normalises": (True,),
    }


def _values(config: HuggingFaceConfig) -> Values:
    return {
        **common_values(config),
        **bias_values(attention=bool(config.get("attention_bias")), mlp=True),
        **window_above_values(config.get("sliding_window"), config),
        "softmax_type": "learnable",
        "glu_activation": "quick_geglu",
        "glu_linear_offset": _OFFSET,
        "ffn_hidden_size": config["intermediate_size"],
        "num_experts": config["num_local_experts"],
        "moe_router_score_function": "softmax",
        "moe_router_linear_bias": True,
    }


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    keys={
        **KEYS,
        "intermediate_size": attrgetter("expert_width"),
        "attention_bias": attrgetter("attention_output_bias"),
        # transformers requires one even where no layer has it.
        "sliding_window": lambda spec: spec.attention.window or _WINDOW,
        "layer_types": layer_types,
        "num_local_experts": num_experts,
        "num_experts_per_tok": "experts_per_token",
        "hidden_act": lambda _: "silu",  # not read: the experts' activation is fixed
        "swiglu_alpha": lambda _: _SIGMOID_GAIN,
        "swiglu_limit": "glu_clamp",
    },
    values_of=_values,
    needs=_needs,
    layers=NAMES["layers"],
    network=NAMES["network"],
    layer={
        **ATTENTION,
        "self_attention.sinks": "self_attn.sinks",
        "post_attention_layernorm": "post_attention_layernorm",
        "mlp.router": "mlp.router",
        "mlp.experts.dense_h_to_4h.weight": Modules(
            ("mlp.experts.gate_up_proj",), lambda _: Transposed()
        ),
        "mlp.experts.dense_h_to_4h.bias": "mlp.experts.gate_up_proj_bias",
        "mlp.experts.dense_4h_to_h.weight": "mlp.experts.down_proj",
        "mlp.experts.dense_4h_to_h.bias": "mlp.experts.down_proj_bias",
    },
)
