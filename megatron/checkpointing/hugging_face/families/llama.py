"""Llama and its kin: rotary positions, RMSNorm, gated MLPs, groups of queries.

Mistral is Llama with a window. Qwen2 has biases of queries, keys and values alone, Qwen3 norms of
queries and keys; both may have a window.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from megatron.checkpointing.hugging_face.families.family import (
    ACTIVATIONS,
    Family,
    HuggingFaceConfig,
    Names,
    Part,
    activation_flags,
    bias_flags,
    linear,
    network_parts,
    norm,
)
from megatron.checkpointing.hugging_face.families.rotary import rope_scaling_config, rotary_flags
from megatron.checkpointing.hugging_face.tensor_mapping import GateUp, QueriesKeysValues
from megatron.config.network.model_spec import ModelSpec

_WINDOW, _FULL = "sliding_attention", "full_attention"
_NO_BIAS = {"linear_bias": (False,), "attention_output_bias": (False,)}

_NAMES = Names(table="model.embed_tokens", layer="model.layers.{}.", final_norm="model.norm")


def common_needs(spec: ModelSpec) -> Mapping[str, tuple[Any, ...]]:
    """Return what all of these architectures need."""
    return {
        "position_embedding": ("rotary",),
        "rotary_dim": (spec.head_dim,),
        "rotary_interpolation": (1.0,) if spec.rope_scaling != 1 else (spec.rotary_interpolation,),
        "normalization": ("RMSNorm",),
        "activation": ("swiglu", "geglu", "geglu_tanh", "reglu", "liglu"),
        # transformers refuses others, whatever the width of a head.
        "hidden_size": (
            -(-spec.hidden_size // spec.num_attention_heads) * spec.num_attention_heads,
        ),
        "embed_layernorm": (False,),
        "scaled_embedding": (False,),
        "residual_after_norm": (False,),
        "parallel_residual": (False,),
        "num_experts": ((),),
    }


def _llama_needs(spec: ModelSpec) -> Mapping[str, tuple[Any, ...]]:
    same = {"qkv_bias": (spec.attention_output_bias,)}
    return {**common_needs(spec), **same, "qk_layernorm": (False,), "window": (0,)}


def _mistral_needs(spec: ModelSpec) -> Mapping[str, tuple[Any, ...]]:
    own = {"qkv_bias": (False,), "qk_layernorm": (False,), "full_attention_layers": ((),)}
    return {**common_needs(spec), **_NO_BIAS, **own}


def _qwen2_needs(spec: ModelSpec) -> Mapping[str, tuple[Any, ...]]:
    return {**common_needs(spec), **_NO_BIAS, "qkv_bias": (True,), "qk_layernorm": (False,)}


def _qwen3_needs(spec: ModelSpec) -> Mapping[str, tuple[Any, ...]]:
    own = {
        "linear_bias": (False,),
        "qkv_bias": (spec.attention_output_bias,),
        "qk_layernorm": (True,),
    }
    return {**common_needs(spec), **own}


def common_config(spec: ModelSpec) -> dict[str, Any]:
    """Return what all of their files config.json hold."""
    return {
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_hidden_size,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_query_groups,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position_embeddings,
        "rope_theta": spec.rotary_base,
        "rope_scaling": rope_scaling_config(spec),
        "hidden_act": ACTIVATIONS[spec.activation],
        "rms_norm_eps": spec.norm_epsilon,
        "attention_dropout": spec.attention_dropout,
    }


def _llama_config(spec: ModelSpec) -> dict[str, Any]:
    biases = {"attention_bias": spec.attention_output_bias, "mlp_bias": spec.linear_bias}
    return {**common_config(spec), **biases}


def _mistral_config(spec: ModelSpec) -> dict[str, Any]:
    return {**common_config(spec), "sliding_window": spec.window or None}


def window_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the window, and the layers that have it."""
    has_window = [bool(spec.window_of(number + 1)) for number in range(spec.num_layers)]
    return {
        "sliding_window": spec.window or None,
        "layer_types": [_WINDOW if windowed else _FULL for windowed in has_window],
    }


def _qwen_config(spec: ModelSpec) -> dict[str, Any]:
    windows = window_config(spec)
    older = {
        "use_sliding_window": bool(spec.window),
        # Older versions read how many layers in front have no window, newer ones the kinds.
        "max_window_layers": [*windows["layer_types"], _WINDOW].index(_WINDOW),
    }
    return {**common_config(spec), **older, **windows}


def _qwen3_config(spec: ModelSpec) -> dict[str, Any]:
    return {**_qwen_config(spec), "attention_bias": spec.attention_output_bias}


def decoder_parts(spec: ModelSpec) -> Iterator[Part]:
    """Yield every parameter, front to back."""
    qkv = QueriesKeysValues(
        groups=spec.num_query_groups,
        queries=spec.num_attention_heads // spec.num_query_groups,
        head_dim=spec.head_dim,
    )

    after = "post_attention_layernorm"

    def layer(ours: str, theirs: str) -> Iterator[Part]:
        yield from norm(spec, f"{ours}input_layernorm", f"{theirs}input_layernorm")
        own, other = f"{ours}self_attention.", f"{theirs}self_attn."
        names = (f"{other}q_proj", f"{other}k_proj", f"{other}v_proj")
        yield from linear(f"{own}query_key_value", names, qkv, has_bias=spec.qkv_bias)
        if spec.qk_layernorm:
            yield from norm(spec, f"{own}q_layernorm", f"{other}q_norm")
            yield from norm(spec, f"{own}k_layernorm", f"{other}k_norm")
        yield from linear(f"{own}dense", (f"{other}o_proj",), has_bias=spec.attention_output_bias)
        if spec.sandwich_norm:
            yield from norm(spec, f"{ours}attention_output_layernorm", f"{theirs}{after}")
            yield from norm(spec, f"{ours}{after}", f"{theirs}pre_feedforward_layernorm")
            behind = f"{theirs}post_feedforward_layernorm"
            yield from norm(spec, f"{ours}mlp_output_layernorm", behind)
        else:
            yield from norm(spec, f"{ours}{after}", f"{theirs}{after}")
        own, other = f"{ours}mlp.", f"{theirs}mlp."
        halves = (f"{other}gate_proj", f"{other}up_proj")
        yield from linear(f"{own}dense_h_to_4h", halves, GateUp(), has_bias=spec.linear_bias)
        yield from linear(f"{own}dense_4h_to_h", (f"{other}down_proj",), has_bias=spec.linear_bias)

    return network_parts(spec, _NAMES, layer)


def common_flags(config: HuggingFaceConfig) -> list[str]:
    """Return the flags of what `common_config` holds."""
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return [
        *("--num-layers", str(config["num_hidden_layers"])),
        *("--hidden-size", str(config["hidden_size"])),
        *("--ffn-hidden-size", str(config["intermediate_size"])),
        *("--num-attention-heads", str(heads), "--kv-channels", str(head_dim)),
        *(["--group-query-attention", "--num-query-groups", str(groups)] if groups < heads else []),
        *("--max-position-embeddings", str(config["max_position_embeddings"])),
        *rotary_flags(config),
        *("--normalization", "RMSNorm", "--layernorm-epsilon", str(config["rms_norm_eps"])),
        *activation_flags(config["hidden_act"], gated=True),
        *("--attention-dropout", str(config["attention_dropout"]), "--hidden-dropout", "0"),
    ]


def _window_flags(window: int | None) -> list[str]:
    return ["--window-size", f"{window - 1},0"] if window else []


def _llama_flags(config: HuggingFaceConfig) -> list[str]:
    biases = {name: bool(config.get(f"{name}_bias")) for name in ("attention", "mlp")}
    return [*common_flags(config), *bias_flags(**biases)]


def _mistral_flags(config: HuggingFaceConfig) -> list[str]:
    window = _window_flags(config.get("sliding_window"))
    return [*common_flags(config), "--disable-bias-linear", *window]


def window_flags(window: int | None, kinds: Sequence[str]) -> list[str]:
    """Return the flags of a window that layers of some `kinds` have."""
    has_window = [kind == _WINDOW for kind in kinds]
    windows = _window_flags(window if any(has_window) else None)
    if windows and not all(has_window):
        pattern = ",".join(str(int(windowed)) for windowed in has_window)
        windows += ["--window-attn-skip-freq", f"[{pattern}]"]
    return windows


def _qwen_flags(config: HuggingFaceConfig, *, own: Callable[[bool], list[str]]) -> list[str]:
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    biases = bool(config.get("attention_bias"))
    return [*common_flags(config), *own(biases), *window_flags(window, _kinds(config))]


def _kinds(config: HuggingFaceConfig) -> list[str]:
    """Return the kind of attention of each layer."""
    layers, full = config["num_hidden_layers"], config["max_window_layers"]
    return config.get("layer_types") or [
        _FULL if number < full else _WINDOW for number in range(layers)
    ]


def _qwen2_own(_: bool) -> list[str]:
    return ["--disable-bias-linear", "--add-qkv-bias"]


def _qwen3_own(attention: bool) -> list[str]:
    return ["--qk-layernorm", *bias_flags(attention=attention, mlp=False)]


def rotary_family(
    model_type: str,
    architecture: str,
    needs: Callable[[ModelSpec], Mapping[str, tuple[Any, ...]]],
    config: Callable[[ModelSpec], dict[str, Any]],
    flags: Callable[[HuggingFaceConfig], list[str]],
    parts: Callable[[ModelSpec], Iterable[Part]] = decoder_parts,
) -> Family:
    """Return a family whose tensors have Llama's prefix."""
    return Family(
        model_type=model_type,
        architecture=architecture,
        prefix="model.",
        needs=needs,
        config=config,
        parts=parts,
        flags=flags,
    )


LLAMA = rotary_family("llama", "LlamaForCausalLM", _llama_needs, _llama_config, _llama_flags)
MISTRAL = rotary_family(
    "mistral", "MistralForCausalLM", _mistral_needs, _mistral_config, _mistral_flags
)
QWEN2 = rotary_family(
    *("qwen2", "Qwen2ForCausalLM", _qwen2_needs, _qwen_config),
    partial(_qwen_flags, own=_qwen2_own),
)
QWEN3 = rotary_family(
    *("qwen3", "Qwen3ForCausalLM", _qwen3_needs, _qwen3_config),
    partial(_qwen_flags, own=_qwen3_own),
)
