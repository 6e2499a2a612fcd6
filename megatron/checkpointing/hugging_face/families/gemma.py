"""Gemma, Gemma 2 and Gemma 3: scaled embeddings, norms around 1.

Gemma 2 norms the outputs of attention and of the MLP too, bounds scores and logits, and gives every
second layer a window. Gemma 3 has norms of queries and keys in place of the bound of scores, and
other rotary positions in the layers with a window.
"""

from collections.abc import Iterator
from typing import Any

from megatron.checkpointing.expressed import Allowed
from megatron.checkpointing.hugging_face.families.family import (
    Family,
    HuggingFaceConfig,
    bias_flags,
)
from megatron.checkpointing.hugging_face.families.llama import (
    ATTENTION,
    KEYS,
    MLP,
    NAMES,
    common_flags,
    common_needs,
    layer_types,
    window_flags,
)
from megatron.common.errors import CheckpointError
from megatron.config.network.model_spec import ModelSpec


def _gemma_needs(spec: ModelSpec) -> Allowed:
    own: Allowed = {"scaled_embedding": (True,), "layernorm_1p": (True,)}
    # Its config.json has "gelu" for the tanh form too.
    activations = ("geglu_tanh", "swiglu", "reglu", "liglu")
    return {**common_needs(spec), **own, "activation": activations}


def _gemma2_needs(spec: ModelSpec) -> Allowed:
    own: Allowed = {
        "activation": common_needs(spec)["activation"],
        "window": None,
        "sandwich_norm": (True,),
        "query_scalar": (float(int(spec.attention.query_scalar)),),
        "attention_softcap": None,
        "logit_softcap": None,
    }
    return {**_gemma_needs(spec), **own}


def _gemma3_needs(spec: ModelSpec) -> Allowed:
    rotary = spec.positions
    is_stretched = rotary.rope_scaling != 1 or rotary.rotary_interpolation != 1
    local = rotary.rotary_local_base
    own: Allowed = {
        "qk_layernorm": (True,),
        "attention_softcap": (0.0,),
        # Its layers with a window are never stretched.
        "rotary_local_base": (
            local or rotary.rotary_base if spec.attention.window and is_stretched else local,
        ),
    }
    return {**_gemma2_needs(spec), **own}


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


def _gemma_flags(config: HuggingFaceConfig) -> Iterator[str]:
    yield from common_flags(config)
    yield from bias_flags(attention=bool(config.get("attention_bias")), mlp=False)
    yield from ("--scale-embedding", "--apply-layernorm-1p")


def _gemma2_flags(config: HuggingFaceConfig) -> Iterator[str]:
    yield from _gemma_flags({**config, "hidden_act": config["hidden_activation"]})
    scalar = str(float(config["query_pre_attn_scalar"]))
    yield from ("--sandwich-norm", "--query-pre-attn-scalar", scalar)
    for bounded in ("attn", "final"):
        if bound := config.get(f"{bounded}_logit_softcapping"):
            yield from (f"--{bounded}-logit-softcapping", str(float(bound)))
    yield from window_flags(config.get("sliding_window"), config["layer_types"])


def _gemma3_flags(config: HuggingFaceConfig) -> Iterator[str]:
    rotary = config["rope_parameters"]
    full, local = rotary["full_attention"], rotary["sliding_attention"]
    flags = list(_gemma2_flags({**config, "rope_parameters": full}))
    yield from (*flags, "--qk-layernorm")
    if "--window-size" in flags:
        if local.get("rope_type", "default") != "default":
            raise CheckpointError(
                f"config.json: there is no flag for rotary positions of the kind {local} in layers "
                "with a window"
            )
        yield from ("--rotary-local-base", str(float(local["rope_theta"])))


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
    flags_of=_gemma_flags,
    needs=_gemma_needs,
    **_NAMES,
)
GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    keys=_GEMMA2_KEYS,
    flags_of=_gemma2_flags,
    needs=_gemma2_needs,
    **_SANDWICH_NAMES,
)
GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    keys=_GEMMA3_KEYS,
    flags_of=_gemma3_flags,
    needs=_gemma3_needs,
    **_SANDWICH_NAMES,
)
