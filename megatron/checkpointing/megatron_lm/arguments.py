"""Translate the arguments saved in Megatron-LM and BigScience checkpoints to our settings."""

from collections.abc import Iterator
from typing import Any

from megatron.common.errors import CheckpointError
from megatron.config.data.tokenizer import with_sentencepiece_form
from megatron.config.network.experts import ExpertConfig, MoESpec, balancing_of
from megatron.config.network.latent import LatentConfig
from megatron.config.network.model import ModelConfig
from megatron.config.network.prediction import PredictionConfig
from megatron.config.parsing.declaration import flags_of as declared_flags
from megatron.config.parsing.files import Values

OF_NETWORK = tuple(flag for flag in declared_flags(ModelConfig) if flag.setting.megatron_lm)
"""Flags of the network that are arguments of the same name."""
OF_PREDICTION = declared_flags(PredictionConfig)
"""Flags of multi-token prediction, likewise."""
_SAME_NAMES = (
    *(flag.name for flag in OF_NETWORK if flag.hint is not bool),
    *("make_vocab_size_divisible_by", "tokenizer_name_or_path", "tokenizer_model"),
    *("vocab_file", "merge_file", "micro_batch_size"),
)
_SWITCHES = (*(flag.name for flag in OF_NETWORK if flag.hint is bool), "bf16", "fp16")
_BIGSCIENCE_POSITIONS = {1: "rotary", 2: "absolute", 3: "alibi"}
_POSITIONS = {"rope": "rotary", "absolute": "learned_absolute"}
_TOKENIZERS = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "PretrainedFromHF": ("tokenizer_name_or_path",),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
}
_TOKENIZER_ARGUMENTS = {name for names in _TOKENIZERS.values() for name in names}
_OF_EXPERTS = {
    **{
        name: name
        for name in (
            *("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
            *("moe_shared_expert_gate", "moe_router_score_function", "moe_router_pre_softmax"),
            *("moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk"),
            *("moe_router_enable_expert_bias", "moe_router_bias_update_rate"),
            *("moe_expert_capacity_factor", "moe_z_loss_coeff", "moe_input_jitter_eps"),
        )
    },
    "moe_router_topk": "topk",
    "moe_aux_loss_coeff": "moe_loss_coeff",
}
"""Our settings of experts by the argument."""
EXPRESSED_OF_EXPERTS = (
    *("num_experts", "expert_ffn_hidden_size", "shared_expert_ffn_hidden_size"),
    *("shared_expert_gate", "router_score", "router_normalises", "router_scale", "router_bias"),
    *("router_groups", "router_groups_per_token"),
)
"""Fields of ModelSpec that arguments of experts express."""
_OF_LATENTS = tuple(flag.name for flag in declared_flags(LatentConfig))
_OF_YARN = {
    "rotary_scaling_factor": "rotary_scaling_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "yarn_original_max_position_embeddings": "rope_original_max_position_embeddings",
    "yarn_beta_slow": "rope_low_freq_factor",
    "yarn_beta_fast": "rope_high_freq_factor",
    "yarn_correction_range_round_to_int": "rope_truncation",
}
"""Our settings of --position-embedding-type yarn by the argument."""
_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")


def values_of(saved: Any, *, holds_experts: bool = False) -> Values:
    """Return our settings of the network and the tokenizer of `saved`.

    Args:
        saved: the argument namespace; None in files without one.
        holds_experts: whether layers with experts are read from its files.

    Raises:
        CheckpointError: no flag expresses a part of the network.
    """
    if saved is None:
        return {}
    arguments = vars(saved)
    if problems := list(_unknown_parts(arguments, holds_experts=holds_experts)):
        raise CheckpointError("; ".join(problems))
    experts = _expert_values(arguments) if holds_experts and arguments.get("num_experts") else ()
    found = dict([*_values(arguments), *experts])
    if found.pop("multi_latent_attention"):
        found.pop("kv_channels", None)  # which has no effect there
        return {**found, "multi_latent_attention": True}
    # Megatron-LM saves the defaults of latent attention with every network.
    found = {name: value for name, value in found.items() if name not in _OF_LATENTS}
    if found["position_embedding_type"] == "yarn":
        found |= {own: arguments[name] for name, own in _OF_YARN.items() if name in arguments}
    return found


def _expert_values(arguments: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the settings of layers with experts."""
    yield "num_experts", [int(arguments["num_experts"])]
    yield "moe_layer_freq", str(arguments.get("moe_layer_freq", 1)).replace(" ", "")
    yield "moe_grouped_gemm", True  # the defaults of Megatron-LM
    for theirs, name in _OF_EXPERTS.items():
        if (value := arguments.get(theirs)) is not None:
            yield name, value
    balancing = arguments.get("moe_router_load_balancing_type", "aux_loss")
    if balancing not in _BALANCING:
        raise CheckpointError(f"no flag expresses moe_router_load_balancing_type {balancing}")
    yield "moe_router_load_balancing_type", balancing


def expert_arguments(moe: MoESpec, flags: ExpertConfig) -> dict[str, Any]:
    """Return the arguments of layers with experts, of which each layer has the same number or none."""
    frequency = [int(count > 1) for count in moe.num_experts]
    return {
        **{theirs: getattr(flags, own) for theirs, own in _OF_EXPERTS.items()},
        "num_experts": max(moe.num_experts),
        # Megatron-LM stacks layers in distributed files if the argument is 1, not a list.
        "moe_layer_freq": 1 if all(frequency) else frequency,
        "moe_router_topk": moe.experts_per_token,
        "moe_ffn_hidden_size": moe.expert_ffn_hidden_size or None,
        "moe_router_score_function": moe.router_score,
        "moe_router_pre_softmax": moe.router_score == "softmax" and not moe.router_normalises,
        "moe_router_load_balancing_type": balancing_of(flags),
    }


def _values(arguments: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    tokenizer = _tokenizer(arguments)
    for name in _SAME_NAMES:
        value = arguments.get(name)
        if name in _TOKENIZER_ARGUMENTS and name not in _TOKENIZERS.get(tokenizer, ()):
            continue
        if isinstance(value, tuple | list):
            value = ",".join(str(part) for part in value)
        if value is not None and value != "":
            yield name, value
    for name in _SWITCHES:
        yield name, bool(arguments.get(name))
    if arguments.get("mtp_num_layers"):
        yield from (
            (flag.name, arguments[flag.name]) for flag in OF_PREDICTION if flag.name in arguments
        )
    for name in ("window_attn_skip_freq", "no_rope_freq"):
        if layers := arguments.get(name):
            yield name, str(layers).replace(" ", "")
    yield "layernorm_epsilon", arguments.get("layernorm_epsilon", arguments.get("norm_epsilon"))
    # Megatron-LM saves groups only if used; DeepSpeed's fork always saves them.
    grouped = arguments.get("group_query_attention")
    groups = arguments.get("num_query_groups" if grouped else "num_key_value_heads")
    if groups not in (None, arguments.get("num_attention_heads")):
        yield from (("group_query_attention", True), ("num_query_groups", groups))
    yield "disable_bias_linear", arguments.get("add_bias_linear") is False
    if not any(
        arguments.get(name) for name in ("swiglu", "squared_relu", "quick_geglu", "glu_activation")
    ):
        yield "gelu", _gelu(arguments)
    yield "position_embedding_type", _position(arguments)
    if tokenizer:
        yield "tokenizer_type", tokenizer
        # Megatron-LM had no such argument while it had only legacy tokens.
        form = with_sentencepiece_form(arguments, is_legacy=True)
        yield "tokenizer_sentencepiece_legacy", bool(form.get("tokenizer_sentencepiece_legacy"))
    yield "pad_vocab_size_to", arguments.get("pad_vocab_size_to") or None


def _gelu(arguments: dict[str, Any]) -> str:
    """Return the GELU form: fused GELU and OpenAI's are the tanh approximation."""
    fused = arguments.get("bias_gelu_fusion", True) and not arguments.get("onnx_safe")
    return "tanh" if arguments.get("openai_gelu") or fused else "erf"


def _position(arguments: dict[str, Any]) -> str:
    position = arguments.get("position_embedding_type")
    if parts := getattr(position, "parts", None):
        # A member of an enumeration, by its value or by its name: see unpickle.py.
        name = _BIGSCIENCE_POSITIONS.get(parts[0], parts[0])
        return _POSITIONS.get(name, name)
    if arguments.get("use_rotary_position_embeddings"):
        return "rotary"
    if arguments.get("add_position_embedding") is False and position in (None, "learned_absolute"):
        return "none"
    return _POSITIONS.get(str(position), str(position)) if position else "learned_absolute"


def _tokenizer(arguments: dict[str, Any]) -> str:
    """Return the tokenizer type if its files were saved too, else ""."""
    kind = str(arguments.get("tokenizer_type"))
    needed = _TOKENIZERS.get(kind)
    if not needed or not all(arguments.get(name) for name in needed):
        return ""
    return kind


def _unknown_parts(arguments: dict[str, Any], *, holds_experts: bool) -> Iterator[str]:
    expert_names = () if holds_experts else ("num_experts",)
    for name in ("rotary_interleaved", *expert_names, "mlp_type"):
        value = arguments.get(name)
        if value not in (None, False, [1], "standard"):
            yield f"no flag expresses {name} {value} of its arguments"
