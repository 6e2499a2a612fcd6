"""The arguments that Megatron-LM reads weights by, and the networks that its files can express."""

import math
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron.checkpointing.expressed import Allowed, not_expressed, plain_values
from megatron.checkpointing.manifest import Manifest
from megatron.checkpointing.megatron_lm.arguments import (
    EXPRESSED_OF_EXPERTS,
    OF_NETWORK,
    OF_PREDICTION,
    expert_arguments,
)
from megatron.checkpointing.megatron_lm.networks import (
    Form,
    first_decoder_stage,
    form_of,
    num_decoder_layers,
)
from megatron.common.errors import CheckpointError
from megatron.common.registry import NETWORKS
from megatron.config.flag_names import flag_setting
from megatron.config.network.experts import MoESpec
from megatron.config.network.latent import TRAINED_LENGTH
from megatron.config.network.model import ModelConfig
from megatron.config.network.model_problems import query_group_problems
from megatron.config.network.model_spec import ModelSpec, flat
from megatron.config.parsing.declaration import Flag
from megatron.tensor_parallel.dtypes import TORCH_DTYPES

_BY_ARGUMENT = (
    *(name.removeprefix("model.") for flag in OF_NETWORK for name in flag.decisions),
    *("num_query_groups", "window", "linear_bias"),
)
"""Fields that arguments express."""
_ACTIVATIONS = (
    "gelu_tanh",
    "gelu_erf",
    "squared_relu",
    "swiglu",
    "geglu",
    "liglu",
    "reglu",
    "quick_geglu",
)
_OF_PREDICTION = {flag.name: flag.decisions[0].removeprefix("model.") for flag in OF_PREDICTION}
"""Fields of multi-token prediction by the argument."""
_TOKENIZER_FLAGS = (
    *("tokenizer_type", "vocab_file", "merge_file", "tokenizer_model", "tokenizer_name_or_path"),
    "make_vocab_size_divisible_by",
)
"""Arguments with the same name as a flag of the tokenizer."""


def written_arguments(
    manifest: Manifest, rows: int, tensor: int, pipeline: int, *, for_release: bool
) -> Namespace:
    """Build the argument namespace that Megatron-LM compares and reads weights by."""
    spec, state, tokenizer = manifest.spec, manifest.state, manifest.tokenizer
    attention, dtype = spec.attention, manifest.precision.dtype
    position = spec.positions.position_embedding
    positions = {"learned": "learned_absolute", "rotary": "rope"}
    decided = flat(spec)
    network = {flag.name: _argument(flag, manifest.network_flags, decided) for flag in OF_NETWORK}
    return Namespace(
        **network
        | {
            "embed_layernorm": decided["embed_layernorm"],  # another flag may imply it
            "kv_channels": attention.head_dim,
            **activation_arguments(spec),
            "position_embedding_type": positions.get(position, position),
            **(_yarn_arguments(spec) if _has_yarn(spec) else {}),
        },
        **{name: getattr(tokenizer, name) for name in _TOKENIZER_FLAGS},
        tokenizer_sentencepiece_legacy=tokenizer.tokenizer_sentencepiece_legacy,
        num_query_groups=attention.num_query_groups,
        group_query_attention=attention.num_query_groups != attention.num_attention_heads,
        padded_vocab_size=rows,
        layernorm_epsilon=spec.norm.norm_epsilon,
        window_attn_skip_freq=_windows(spec),
        add_bias_linear=spec.mlp.linear_bias,
        **written_form(spec).arguments(spec, pipeline),
        **(expert_arguments(spec.moe, manifest.expert_flags) if spec.moe else {}),
        **({name: decided[own] for name, own in _OF_PREDICTION.items()} if spec.prediction else {}),
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        fp16=dtype == "fp16",
        bf16=dtype == "bf16",
        params_dtype=TORCH_DTYPES[dtype],
        consumed_train_samples=0 if for_release else state.samples,
        consumed_valid_samples=0 if for_release else state.valid_samples,
    )


def activation_arguments(spec: ModelSpec) -> dict[str, Any]:
    """Return the arguments that choose the activation of MLPs."""
    activation = spec.mlp.activation
    return {
        "swiglu": activation == "swiglu",
        "quick_geglu": activation == "quick_geglu",
        "squared_relu": activation == "squared_relu",
        "glu_activation": activation if activation in ("geglu", "liglu", "reglu") else None,
        "bias_gelu_fusion": activation == "gelu_tanh",
    }


def _argument(flag: Flag, given: ModelConfig, decided: Mapping[str, Any]) -> Any:
    """Return the value of a flag as it was given, or as resolved without it."""
    value = getattr(given, flag.name)
    if value is not None:
        return value
    found = decided.get(flag.name)
    # 0 stands for what is not there, such as a latent of queries.
    return None if found == 0 and not flag.setting.allows(0) else found


def _windows(spec: ModelSpec) -> list[int] | None:
    """Return 1 for each layer with sliding window, 0 for the rest; None if all are alike."""
    full = spec.attention.full_attention_layers
    return [int(n not in full) for n in range(1, spec.num_layers + 1)] if full else None


def writing_problems(
    spec: ModelSpec,
    tensor: int,
    pipeline: int,
    flags: tuple[str, str],
    *,
    distributed: bool = False,
) -> Iterator[str]:
    """Yield why Megatron-LM's files cannot hold a network, or `tensor` * `pipeline` ranks divide it.

    Args:
        flags: names of the flags for `tensor` and `pipeline`.
        distributed: whether the files have the format torch_dist.
    """
    yield from written_form(spec).problems(spec, pipeline=pipeline, flag=flags[1])
    if spec.moe and (problems := [*_expert_problems(spec, distributed=distributed)]):
        spec = replace(spec, moe=None)
        yield from problems
    if not distributed:
        yield from (
            f"Megatron-LM's files of ranks cannot express {what}: write --ckpt-format torch_dist"
            for what, has_it in _of_core(spec).items()
            if has_it
        )
    if spec.lora and spec.lora.lora_rank:
        spec = replace(spec, lora=None)
        yield "Megatron-LM's files cannot express adapters (--lora-rank): merge them into the weights"
    for field, value, _ in not_expressed(spec, _expressed(spec, distributed=distributed)):
        yield f"Megatron-LM's files cannot express {field} {value} ({flag_setting(field)})"
    decoder_layers = num_decoder_layers(spec)
    if decoder_layers and pipeline > 1 and not first_decoder_stage(spec, pipeline):
        yield (
            f"{flags[1]} {pipeline} cannot be divided between the {spec.num_layers} layers of "
            f"the encoder and the {decoder_layers} of the decoder"
        )
    for flag, parts, sizes in (
        (flags[1], pipeline, () if decoder_layers else ("num_layers",)),
        (flags[0], tensor, ("num_attention_heads", "ffn_hidden_size")),
    ):
        if parts < 1:
            yield f"{flag} {parts} must be at least 1"
            continue
        for size in sizes:
            if (value := flat(spec)[size]) % parts:
                yield f"{flag} {parts} does not divide {size} {value}"
    if tensor > 0:
        # Ranks that share a query group have parts of its projection, as here.
        attention = spec.attention
        yield from query_group_problems(
            attention.num_query_groups, attention.head_dim, tensor, flag=flags[0]
        )


def _of_core(spec: ModelSpec) -> dict[str, bool]:
    """Return what megatron.core alone has, whose names files of ranks do not have: whether it is there."""
    return {
        "latent attention (--multi-latent-attention)": spec.latent is not None,
        "learned attention sinks (--softmax-type learnable)": spec.attention.softmax_type
        == "learnable",
        "gates of a quick GELU (--quick-geglu)": spec.mlp.activation == "quick_geglu",
        "multi-token prediction (--mtp-num-layers)": spec.prediction is not None,
        "YaRN (--rope-scaling-type yarn)": _has_yarn(spec),
    }


def _expert_problems(spec: ModelSpec, *, distributed: bool) -> Iterator[str]:
    counts = {*spec.part(MoESpec).num_experts} - {1}
    if not counts:
        return
    if not written_form(spec).has_experts:
        yield f"Megatron-LM has no {spec.architecture} with experts (--num-experts)"
    elif not distributed:
        yield (
            "Megatron-LM's files of ranks cannot express layers with experts (--num-experts): "
            "write --ckpt-format torch_dist"
        )
    elif len(counts) > 1:
        yield f"Megatron-LM's layers have the same number of experts, not {sorted(counts)} (--num-experts)"


def _expressed(spec: ModelSpec, *, distributed: bool = False) -> Allowed:
    """Return the values of fields that the arguments or weights of these files express."""
    of_experts = EXPRESSED_OF_EXPERTS if distributed else ()
    return {
        **plain_values(spec),
        **dict.fromkeys((*_BY_ARGUMENT, *of_experts)),
        "architecture": None,
        "position_embedding": ("learned", "rotary", "alibi", "none"),
        "normalization": ("LayerNorm", "RMSNorm"),
        "activation": _ACTIVATIONS,
        "softmax_type": None,
        "latent_norm_epsilon": (spec.norm.norm_epsilon,) if spec.latent else (0.0,),
        **dict.fromkeys(_OF_PREDICTION.values()),
        "router_linear_bias": (False, spec.mlp.linear_bias),
        **(_yarn_fields(spec) if _has_yarn(spec) else {}),
        "attention_output_bias": None,
        "attention_bias_apart": (False,),
        **dict.fromkeys(written_form(spec).expresses),
    }


def _has_yarn(spec: ModelSpec) -> bool:
    return spec.positions.rope_rule == "yarn" and spec.positions.rope_scaling != 1


def _yarn_fields(spec: ModelSpec) -> Allowed:
    """Return the values of YaRN's fields that arguments express."""
    constants = ("rope_low_freq_factor", "rope_high_freq_factor", "rope_original_length")
    if spec.latent:
        # No argument changes them there.
        values = ((1.0,), (32.0,), (TRAINED_LENGTH,))
        own: Allowed = {"query_scalar": None, **dict(zip(constants, values, strict=True))}
    else:
        own = dict.fromkeys((*constants, "rope_truncation"))
    return {**own, "rope_rule": ("yarn",), "rope_attention_factor": None}


def _yarn_arguments(spec: ModelSpec) -> dict[str, Any]:
    """Return the arguments of YaRN, with the weights of its scales that make these factors."""
    positions, scalar = spec.positions, spec.attention.query_scalar
    scores = (spec.attention.head_dim / scalar) ** 0.25 if spec.latent and scalar else 1.0
    share = 0.1 * math.log(positions.rope_scaling)
    return {
        "use_rope_scaling": False,
        "position_embedding_type": "rope" if spec.latent else "yarn",
        "rope_type": "yarn" if spec.latent else None,
        "rotary_scaling_factor": positions.rope_scaling,
        "mscale": round((positions.rope_attention_factor * scores - 1) / share, 9),
        "mscale_all_dim": round((scores - 1) / share, 9),
        "yarn_original_max_position_embeddings": positions.rope_original_length,
        "yarn_beta_fast": positions.rope_high_freq_factor,
        "yarn_beta_slow": positions.rope_low_freq_factor,
        "yarn_correction_range_round_to_int": positions.rope_truncation,
    }


def written_form(spec: ModelSpec) -> Form:
    """Return the form of a network in these files.

    Raises:
        CheckpointError: they cannot hold it.
    """
    name = spec.architecture
    if name in NETWORKS and (form := form_of(name)):
        return form
    raise CheckpointError(
        f"a network {name} is not written in the format of Megatron-LM: "
        "tools/convert_checkpoint/to_hf.py writes the formats of transformers and others"
    )
