"""Gemma, Gemma 2 and Gemma 3: scaled embeddings, norms around 1.

Gemma 2 norms the outputs of attention and of the MLP too, bounds scores and logits, and gives every
second layer a window. Gemma 3 has norms of queries and keys in place of the bound of scores, and
other rotary positions in the layers with a window.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron.checkpointing.hugging_face.families.family import HuggingFaceConfig, Part, bias_flags
from megatron.checkpointing.hugging_face.families.llama import (
    common_config,
    common_flags,
    common_needs,
    decoder_parts,
    rotary_family,
    window_config,
    window_flags,
)
from megatron.checkpointing.hugging_face.tensor_mapping import Identity, OffsetByOne
from megatron.common.errors import CheckpointError
from megatron.config.network.model_spec import ModelSpec


def _shared_needs(spec: ModelSpec) -> Mapping[str, tuple[Any, ...]]:
    own = {
        "scaled_embedding": (True,),
        "layernorm_1p": (True,),
        "linear_bias": (False,),
        "qkv_bias": (spec.attention_output_bias,),
        "qk_layernorm": (False,),
    }
    return {**common_needs(spec), **own}


def _gemma_needs(spec: ModelSpec) -> Mapping[str, tuple[Any, ...]]:
    # Its config.json has "gelu" for the tanh form too.
    own = {"activation": ("geglu_tanh", "swiglu", "reglu", "liglu"), "window": (0,)}
    return {**_shared_needs(spec), **own}


def _gemma2_needs(spec: ModelSpec) -> Mapping[str, tuple[Any, ...]]:
    own = {
        "sandwich_norm": (True,),
        "query_scalar": (float(int(spec.query_scalar)),),
        "attention_softcap": (spec.attention_softcap,),
        "logit_softcap": (spec.logit_softcap,),
    }
    return {**_shared_needs(spec), **own}


def _gemma3_needs(spec: ModelSpec) -> Mapping[str, tuple[Any, ...]]:
    is_stretched = spec.rope_scaling != 1 or spec.rotary_interpolation != 1
    local = spec.rotary_local_base
    own = {
        "qk_layernorm": (True,),
        "attention_softcap": (0.0,),
        # Its layers with a window are never stretched.
        "rotary_local_base": (
            local or spec.rotary_base if spec.window and is_stretched else local,
        ),
    }
    return {**_gemma2_needs(spec), **own}


def _gemma_config(spec: ModelSpec) -> dict[str, Any]:
    own = {"attention_bias": spec.attention_output_bias, "use_bidirectional_attention": False}
    return {**common_config(spec), **own}


def _gemma2_config(spec: ModelSpec) -> dict[str, Any]:
    config = _gemma_config(spec)
    own = {
        "hidden_activation": config.pop("hidden_act"),
        "query_pre_attn_scalar": int(spec.query_scalar or spec.head_dim),
        "attn_logit_softcapping": spec.attention_softcap or None,
        "final_logit_softcapping": spec.logit_softcap or None,
    }
    # transformers needs a window also where no layer has it.
    window = {"sliding_window": spec.window or spec.max_position_embeddings}
    return {**config, **own, **window_config(spec), **window}


def _gemma3_config(spec: ModelSpec) -> dict[str, Any]:
    local = spec.rotary_local_base or spec.rotary_base
    return {**_gemma2_config(spec), "rope_local_base_freq": local}


def _parts(spec: ModelSpec) -> Iterator[Part]:
    for part in decoder_parts(spec):
        # Norms are kept around 1 there too.
        yield replace(part, mapping=Identity()) if part.mapping == OffsetByOne() else part


def _gemma_flags(config: HuggingFaceConfig) -> list[str]:
    biases = bias_flags(attention=bool(config.get("attention_bias")), mlp=False)
    return [*common_flags(config), *biases, "--scale-embedding", "--apply-layernorm-1p"]


def _gemma2_flags(config: HuggingFaceConfig) -> list[str]:
    scalar = float(config["query_pre_attn_scalar"])
    scores, logits = (config.get(f"{name}_logit_softcapping") for name in ("attn", "final"))
    return [
        *_gemma_flags({**config, "hidden_act": config["hidden_activation"]}),
        *("--sandwich-norm", "--query-pre-attn-scalar", str(scalar)),
        *(["--attn-logit-softcapping", str(float(scores))] if scores else []),
        *(["--final-logit-softcapping", str(float(logits))] if logits else []),
        *window_flags(config.get("sliding_window"), config["layer_types"]),
    ]


def _gemma3_flags(config: HuggingFaceConfig) -> list[str]:
    rotary = config["rope_parameters"]
    full, local = rotary["full_attention"], rotary["sliding_attention"]
    flags = _gemma2_flags({**config, "rope_parameters": full})
    if "--window-size" in flags:
        if local.get("rope_type", "default") != "default":
            raise CheckpointError(
                f"config.json: there is no flag for rotary positions of the kind {local} in layers "
                "with a window"
            )
        flags += ["--rotary-local-base", str(float(local["rope_theta"]))]
    return [*flags, "--qk-layernorm"]


GEMMA = rotary_family(
    "gemma", "GemmaForCausalLM", _gemma_needs, _gemma_config, _gemma_flags, _parts
)
GEMMA2 = rotary_family(
    "gemma2", "Gemma2ForCausalLM", _gemma2_needs, _gemma2_config, _gemma2_flags, _parts
)
GEMMA3 = rotary_family(
    "gemma3_text", "Gemma3ForCausalLM", _gemma3_needs, _gemma3_config, _gemma3_flags, _parts
)
