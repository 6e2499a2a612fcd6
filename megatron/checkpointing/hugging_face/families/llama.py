"""Llama and its kin: rotary positions, RMSNorm, gated MLPs, groups of queries.

Mistral is Llama with a window. Qwen2 has biases of queries, keys and values alone, Qwen3 norms of
queries and keys; both may have a window.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from megatron.checkpointing.expressed import Allowed
from megatron.checkpointing.hugging_face.families.family import (
    Family,
    HuggingFaceConfig,
    Modules,
    Table,
    activation_name,
    activation_values,
    bias_values,
)
from megatron.checkpointing.hugging_face.families.rotary import (
    EXPRESSED,
    rope_scaling_config,
    rotary_values,
)
from megatron.checkpointing.hugging_face.families.tensor_mapping import GateUp, QueriesKeysValues
from megatron.config.network.model_spec import ModelSpec
from megatron.config.parsing.files import Values

_WINDOW, _FULL = "sliding_attention", "full_attention"


def common_needs(spec: ModelSpec) -> Allowed:
    """Return the values that all of these architectures have."""
    return {
        **EXPRESSED,
        "position_embedding": ("rotary",),
        "rotary_dim": (spec.attention.head_dim,),
        "normalization": ("RMSNorm",),
        "activation": ("swiglu", "geglu", "geglu_tanh", "reglu", "liglu"),
        # transformers refuses other widths, for any width of a head.
        "hidden_size": (
            -(-spec.hidden_size // spec.attention.num_attention_heads)
            * spec.attention.num_attention_heads,
        ),
        "num_query_groups": None,
        "head_dim": None,
        "linear_bias": (False,),
        "attention_output_bias": None,
    }


def _llama_needs(spec: ModelSpec) -> Allowed:
    return {**common_needs(spec), "linear_bias": None}


def _mistral_needs(spec: ModelSpec) -> Allowed:
    needs: Allowed = {"attention_output_bias": (False,), "window": None}
    return {**common_needs(spec), **needs, "full_attention_layers": ((),)}


def _qwen2_needs(spec: ModelSpec) -> Allowed:
    needs: Allowed = {"attention_output_bias": (False,), "window": None}
    return {**common_needs(spec), **needs, "qkv_bias": (True,)}


def _qwen3_needs(spec: ModelSpec) -> Allowed:
    return {**common_needs(spec), "qk_layernorm": (True,), "window": None}


def window_or_none(spec: ModelSpec) -> int | None:
    """Return the sliding window; None for no limit."""
    return spec.attention.window or None


def layer_types(spec: ModelSpec) -> list[str]:
    """Return the kind of attention of each layer: with the sliding window or without."""
    numbers = range(1, spec.num_layers + 1)
    return [_WINDOW if spec.attention.window_of(number) else _FULL for number in numbers]


def _layers_before_windows(spec: ModelSpec) -> int:
    return [*layer_types(spec), _WINDOW].index(_WINDOW)


KEYS: dict[str, Any] = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": attrgetter("attention.num_query_groups"),
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "rope_theta": attrgetter("positions.rotary_base"),
    "rope_scaling": rope_scaling_config,
    "hidden_act": activation_name,
    "rms_norm_eps": "norm_epsilon",
    "attention_dropout": "attention_dropout",
}
"""Entries of config.json in all of these architectures; see Family.keys."""

_BIAS = {"attention_bias": attrgetter("attention_output_bias")}
_QWEN_KEYS = {
    **KEYS,
    "use_sliding_window": lambda spec: bool(spec.attention.window),
    # Older versions read how many layers in front have no window, newer ones the kinds.
    "max_window_layers": _layers_before_windows,
    "sliding_window": window_or_none,
    "layer_types": layer_types,
}


def common_values(config: HuggingFaceConfig) -> dict[str, Any]:
    """Return the settings for `KEYS` that are not ModelSpec fields."""
    return {
        **group_values(config),
        **rotary_values(config),
        **{"normalization": "RMSNorm", "hidden_dropout": 0},
        **activation_values(config["hidden_act"], gated=True),
    }


def group_values(config: HuggingFaceConfig) -> dict[str, Any]:
    """Return the settings of query groups."""
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    return {"group_query_attention": True, "num_query_groups": groups} if groups < heads else {}


def _llama_values(config: HuggingFaceConfig) -> Values:
    attention, mlp = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    return {**common_values(config), **bias_values(attention=attention, mlp=mlp)}


def attention_bias_values(config: HuggingFaceConfig) -> Values:
    """Return the settings of biases that only attention may have."""
    return bias_values(attention=bool(config.get("attention_bias")), mlp=False)


def _mistral_values(config: HuggingFaceConfig) -> Values:
    window = window_values(config.get("sliding_window"), [_WINDOW])
    return {**common_values(config), "disable_bias_linear": True, **window}


def window_values(window: int | None, kinds: Sequence[str]) -> Values:
    """Return the settings of a window that layers of some `kinds` have."""
    has_window = [kind == _WINDOW for kind in kinds]
    if not window or not any(has_window):
        return {}
    pattern = ",".join(str(int(windowed)) for windowed in has_window)
    some = {} if all(has_window) else {"window_attn_skip_freq": f"[{pattern}]"}
    return {"window_size": f"{window - 1},0", **some}


def window_above_values(window: int | None, config: HuggingFaceConfig) -> Values:
    """Return the settings of a window of the layers that `layer_types` or `max_window_layers` names."""
    layers = config["num_hidden_layers"]
    full = config.get("max_window_layers", layers)
    kinds = [_FULL if number < full else _WINDOW for number in range(layers)]
    return window_values(window, config.get("layer_types") or kinds)


def _qwen_values(config: HuggingFaceConfig) -> Values:
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    return {**common_values(config), **window_above_values(window, config)}


def _qwen2_values(config: HuggingFaceConfig) -> Values:
    return {**_qwen_values(config), "disable_bias_linear": True, "add_qkv_bias": True}


def _qwen3_values(config: HuggingFaceConfig) -> Values:
    return {**_qwen_values(config), "qk_layernorm": True, **attention_bias_values(config)}


def qkv_mapping(spec: ModelSpec) -> QueriesKeysValues:
    """Return the mapping of queries, keys and values."""
    return QueriesKeysValues(
        groups=spec.attention.num_query_groups,
        queries=spec.attention.num_attention_heads // spec.attention.num_query_groups,
        head_dim=spec.attention.head_dim,
    )


def _gate_up(_: ModelSpec) -> GateUp:
    return GateUp()


ATTENTION: Table = {
    "input_layernorm": "input_layernorm",
    "self_attention.query_key_value": Modules(
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), qkv_mapping
    ),
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "self_attention.dense": "self_attn.o_proj",
}
MLP: Table = {
    "mlp.dense_h_to_4h": Modules(("mlp.gate_proj", "mlp.up_proj"), _gate_up),
    "mlp.dense_4h_to_h": "mlp.down_proj",
}
"""Modules of a layer; see Family."""

NAMES: dict[str, Any] = {
    "layers": "model.layers.{}.",
    "network": {
        "embedding.word_embeddings": "model.embed_tokens",
        "final_layernorm": "model.norm",
        "output_layer": "lm_head",
    },
    "layer": {**ATTENTION, "post_attention_layernorm": "post_attention_layernorm", **MLP},
}
"""Module names of these architectures; see Family."""

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    keys={**KEYS, **_BIAS, "mlp_bias": attrgetter("mlp.linear_bias")},
    values_of=_llama_values,
    needs=_llama_needs,
    **NAMES,
)
MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    keys={**KEYS, "sliding_window": window_or_none},
    values_of=_mistral_values,
    needs=_mistral_needs,
    **NAMES,
)
QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    keys=_QWEN_KEYS,
    values_of=_qwen2_values,
    needs=_qwen2_needs,
    **NAMES,
)
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    keys={**_QWEN_KEYS, **_BIAS},
    values_of=_qwen3_values,
    needs=_qwen3_needs,
    **NAMES,
)
