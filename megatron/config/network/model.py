"""The network: its flags, and the ModelSpec that they resolve to."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from megatron.common.registry import ACTIVATIONS, NORMS, POSITION_EMBEDDINGS
from megatron.config.data.tokenizer import TokenizerConfig, padded_vocab_size, true_vocab_size
from megatron.config.network.experts import ExpertConfig, experts_of_layers, moe_spec
from megatron.config.network.layer_pattern import window_of, windowless_layers
from megatron.config.network.lora import LoraConfig, lora_spec
from megatron.config.network.model_spec import (
    AttentionSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    PositionSpec,
    VocabularySpec,
)
from megatron.config.parsing.declaration import resolved, setting


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network."""

    num_layers: int = setting(at_least=1, older=("--encoder-num-layers",))
    """Number of transformer layers; of the encoder, where a decoder is behind it."""

    hidden_size: int = setting(at_least=1)
    """Width of the residual stream, in features."""

    num_attention_heads: int = setting(at_least=1)
    """Number of attention heads over all tensor-parallel ranks."""

    seq_length: int = setting(at_least=1, older=("--encoder-seq-length",))
    """Sequence length: tokens of a sample."""

    max_position_embeddings: int | None = None
    """Longest sequence of the network, in tokens (default: --seq-length). A learned table of positions
    has so many rows."""

    ffn_hidden_size: int | None = setting(None, at_least=1)
    """Width inside the MLP, in features (default: 4 * hidden_size, gated or not)."""

    kv_channels: int | None = setting(None, at_least=1, plan="model.head_dim")
    """Features per attention head (default: hidden_size / num_attention_heads)."""

    group_query_attention: bool = False
    """Let several heads share one key and one value."""

    num_query_groups: int | None = setting(None, at_least=1, older=("--num-key-value-heads",))
    """Number of keys and values per token with --group-query-attention (default: 1)."""

    window_size: str | None = None
    """Sliding window attention, as LEFT or LEFT,0: how many tokens before itself a token sees; -1
    for all of them."""

    window_attn_skip_freq: str | None = setting(None, plan="model.full_attention_layers")
    """Layers without the window (default: none), as in Megatron-LM: every N-th one, or a list of 1 for
    a layer with --window-size and 0 for one without, such as [1,1,1,0]*6."""

    apply_query_key_layer_scaling: bool = setting(
        True, flag="--no-query-key-layer-scaling", plan="model.query_key_layer_scaling"
    )
    """Attention scores divided by the number of their layer until softmax multiplies it back,
    which keeps those of deep layers inside the range of fp16. The result is the same."""

    query_pre_attn_scalar: float | None = setting(None, above=0, plan="model.query_scalar")
    """Divide attention scores by the square root of this (default: the features per head)."""

    attn_logit_softcapping: float | None = setting(None, above=0, plan="model.attention_softcap")
    """Soft-cap attention scores: cap * tanh(score / cap), in front of the mask, as Gemma 2 does."""

    final_logit_softcapping: float | None = setting(None, above=0, plan="model.logit_softcap")
    """Soft-cap the logits of the head: cap * tanh(logit / cap), as Gemma 2 does."""

    qk_layernorm: bool = False
    """Norm every head's query and key, in front of rotary positions."""

    position_embedding_type: (
        Literal["learned_absolute", "absolute", "relative", "rotary", "rope", "alibi", "none"]
        | None
    ) = setting(None, names=POSITION_EMBEDDINGS, plan="model.position_embedding")
    """Position embedding: a learned table (learned_absolute or absolute, the default), rotary (rotary
    or rope), a penalty on distance (alibi), a learned bias for each bucket of distances (relative,
    of a decoder behind an encoder), or none."""

    use_rotary_position_embeddings: bool = False
    """Megatron's older spelling of --position-embedding-type rotary."""

    add_position_embedding: bool = setting(True, flag="--no-position-embedding")
    """The learned table of positions."""

    rotary_base: float = setting(
        10000.0, above=0, matters=False, older=("--rotary-position-embeddings-theta",)
    )
    """Base of the rotary wavelengths."""

    rotary_local_base: float | None = setting(
        None, above=0, matters=False, older=("--rope-local-base-freq",)
    )
    """Base of the rotary wavelengths in layers with --window-size, which nothing stretches there,
    as in Gemma 3 (default: layers with and without the window have the same positions)."""

    rotary_percent: float = setting(1.0, above=0, matters=False, at_most=1)
    """Share of a head's features that rotary embedding rotates, from the first on."""

    rotary_seq_len_interpolation_factor: float | None = setting(
        None, above=0, matters=False, plan="model.rotary_interpolation"
    )
    """Divide rotary positions by this, to stretch a trained network to longer sequences."""

    use_rope_scaling: bool = False
    """Stretch the long wavelengths of rotary positions; as Llama 3.1 does, unless
    --rope-scaling-type names another rule."""

    rope_scaling_type: Literal["llama3", "yarn", "dynamic"] = setting(
        "llama3", plan="model.rope_rule"
    )
    """Rule of --use-rope-scaling: that of Llama 3.1, YaRN, or dynamic NTK, which changes nothing up
    to the length that the network was trained on (farther than that it is refused)."""

    rope_scaling_factor: float = setting(8.0, above=0, matters=False, plan="model.rope_scaling")
    """By how much --use-rope-scaling stretches them."""

    rope_low_freq_factor: float | None = setting(None, above=0, older=("--rope-beta-slow",))
    """Turns within the original length up to which --use-rope-scaling stretches a wavelength in
    full (default: 1)."""

    rope_high_freq_factor: float | None = setting(None, above=0, older=("--rope-beta-fast",))
    """Turns within the original length from which --use-rope-scaling leaves a wavelength alone
    (default: 4, and 32 with YaRN)."""

    rope_original_max_position_embeddings: int | None = setting(
        None, above=0, plan="model.rope_original_length"
    )
    """Tokens that the network was trained on before its wavelengths were stretched (default: 8192
    with the rule of Llama 3.1; the other rules need it)."""

    rope_attention_factor: float | None = setting(None, above=0)
    """Factor of rotated queries and keys with YaRN (default: 0.1 ln(factor) + 1)."""

    rope_truncation: bool = setting(True, plan="model.rope_truncation")
    """YaRN's bounds between the wavelengths rounded outward to full pairs of features."""

    normalization: str = setting("LayerNorm", names=NORMS)
    """Which norm stands in front of attention, of the MLP and of the head."""

    norm_epsilon: float = setting(
        1e-5, above=0, flag="--layernorm-epsilon", older=("--norm-epsilon",)
    )
    """Added to the variance in every norm."""

    apply_layernorm_1p: bool = setting(False, plan="model.layernorm_1p")
    """Keep the weight of a norm as its difference from 1, so that weight decay and 16-bit rounding
    act around 1."""

    scale_embedding: bool = setting(False, plan="model.scaled_embedding")
    """Multiply the token embedding by sqrt(hidden_size), as Gemma does."""

    embed_layernorm: bool = False
    """Norm the token embedding, in front of positions and dropout."""

    apply_residual_connection_post_layernorm: bool = setting(
        False, plan="model.residual_after_norm"
    )
    """Take the residual behind a layer's norms instead of in front of them."""

    sandwich_norm: bool = False
    """Norm the outputs of attention and of the MLP too, in front of the residuals, as Gemma 2
    does."""

    parallel_residual: bool = setting(False, older=("--use-parallel-residual",))
    """Let the MLP read what attention reads, and add both to it, as GPT-NeoX and Pythia do."""

    gelu: Literal["tanh", "erf"] | None = None
    """Form of GELU: exact (erf) or approximate (tanh, the default). No kernel changes the form."""

    openai_gelu: bool = False
    """Megatron's spelling of --gelu tanh."""

    onnx_safe: Literal["True", "False", "true", "false"] | None = None
    """Megatron's spelling of --gelu erf, when true."""

    glu_activation: Literal["geglu", "geglu_tanh", "liglu", "reglu", "swiglu"] | None = None
    """A gated MLP: one half of its inner features, passed through GELU (erf or tanh), nothing, ReLU
    or SiLU, multiplies the other half. --ffn-hidden-size is the width of each half."""

    swiglu: bool = False
    """Megatron's spelling of --glu-activation swiglu."""

    squared_relu: bool = False
    """The square of ReLU in the MLP instead of GELU."""

    relu: bool = False
    """ReLU in the MLP instead of GELU."""

    activation: str | None = setting(None, names=ACTIVATIONS)
    """Activation of the MLP by its name, which may be that of a plugin; default: that of the flags
    above, else GELU."""

    add_bias_linear: bool = setting(True, flag="--disable-bias-linear", plan="model.linear_bias")
    """The biases of the linear layers."""

    add_qkv_bias: bool = setting(False, plan="model.qkv_bias")
    """Keep the bias of queries, keys and values when --disable-bias-linear takes out the others."""

    attention_bias: Literal["on", "off"] | None = setting(None, plan="model.attention_bias_apart")
    """Biases of attention's linear layers (queries, keys, values and output) apart from those of
    the MLP (default: both as with --disable-bias-linear)."""

    untie_embeddings_and_output_weights: bool = setting(False, plan="not model.tied_embeddings")
    """Give the head a weight of its own instead of that of the token embedding."""

    fp32_residual_connection: bool = setting(False, plan="model.fp32_residual")
    """Keep the residual stream in 32 bits when the layers compute in 16."""

    attention_dropout: float = setting(0.1, at_least=0, below=1)
    """Probability that an attention weight is dropped in training."""

    hidden_dropout: float = setting(0.1, at_least=0, below=1)
    """Probability that a feature is dropped after embedding, attention and MLP in training."""

    init_method_std: float = setting(0.02, above=0, plan="model.init_std")
    """Standard deviation of the initial weights; divided by sqrt(2 * num_layers) in front of the
    residual stream."""

    init_method_xavier_uniform: bool = False
    """Draw the initial weights evenly from +-sqrt(6 / (rows + columns)) instead."""


def resolve_model(
    model: ModelConfig,
    experts: ExpertConfig,
    lora: LoraConfig,
    tokenizer: TokenizerConfig,
    *,
    vocab_size: int,
    tensor: int,
    norms_embedding: bool,
) -> ModelSpec:
    """Return what all networks have in common, as a GPT, for a tokenizer of `vocab_size` tokens.

    Args:
        tensor: number of tensor-parallel ranks, which divide the rows of the token table evenly.
        norms_embedding: whether another flag implies --embed-layernorm.
    """
    return resolved(
        ModelSpec,
        "model",
        model,
        vocabulary=_vocabulary_spec(model, tokenizer, vocab_size, tensor),
        positions=_position_spec(model),
        attention=_attention_spec(model),
        norm=resolved(
            NormSpec,
            "model",
            model,
            embed_layernorm=model.embed_layernorm or norms_embedding,
        ),
        mlp=resolved(
            MLPSpec,
            "model",
            model,
            ffn_hidden_size=ffn_hidden_size_of(model),
            activation=activation_of(model),
            left_at_default=["mlp_layout"],
        ),
        moe=moe_spec(experts, experts_of_layers(experts, model.num_layers)),
        lora=lora_spec(lora),
        init="xavier_uniform" if model.init_method_xavier_uniform else "normal",
        left_at_default=("architecture", "own_flags", "own", "head"),
    )


def _attention_spec(model: ModelConfig) -> AttentionSpec:
    scalar = model.query_pre_attn_scalar
    return resolved(
        AttentionSpec,
        "model",
        model,
        num_query_groups=num_query_groups_of(model),
        head_dim=head_dim_of(model),
        window=window_of(model.window_size),
        full_attention_layers=full_attention_layers_of(model),
        query_scalar=0.0 if scalar in (None, head_dim_of(model)) else scalar,
        qkv_bias=_attention_bias(model) or model.add_qkv_bias,
        attention_bias_apart=_attention_bias(model) != model.add_bias_linear,
        left_at_default=("attention", "qkv_layout"),
    )


def _vocabulary_spec(
    model: ModelConfig, tokenizer: TokenizerConfig, vocab_size: int, tensor: int
) -> VocabularySpec:
    rows = true_vocab_size(tokenizer, vocab_size)
    padded = padded_vocab_size(
        rows,
        divisible_by=tokenizer.make_vocab_size_divisible_by,
        tensor=tensor,
        pad_to=tokenizer.pad_vocab_size_to,
    )
    return resolved(
        VocabularySpec,
        "model",
        model,
        vocab_size=rows,
        padded_vocab_size=padded,
        padded_vocab_in_softmax=bool(tokenizer.padded_vocab_in_softmax) and padded > rows,
    )


def _position_spec(model: ModelConfig) -> PositionSpec:
    """Return the position embedding of the network."""
    kind = position_of(model)
    turning: dict[str, Any] = {"rotary_dim": 0, "rotary_base": 0.0, "rotary_interpolation": 1.0}
    if kind == "rotary":
        turning = {
            "rotary_dim": int(head_dim_of(model) * model.rotary_percent),
            "rotary_base": model.rotary_base,
            "rotary_local_base": model.rotary_local_base or 0.0,
            "rotary_interpolation": model.rotary_seq_len_interpolation_factor or 1.0,
            **_stretching(model),
        }
    return PositionSpec(
        position_embedding=kind,
        max_position_embeddings=model.max_position_embeddings or model.seq_length,
        **{"rope_scaling": 1.0} | turning,
    )


def _attention_bias(model: ModelConfig) -> bool:
    return model.attention_bias == "on" if model.attention_bias else model.add_bias_linear


def _stretching(model: ModelConfig) -> dict[str, Any]:
    """Return the RoPE scaling of the network, as fields of PositionSpec."""
    if not model.use_rope_scaling or model.rope_scaling_factor == 1:
        return {}
    factor, rule = model.rope_scaling_factor, model.rope_scaling_type
    flags: dict[str, float | None] = {
        "rope_original_length": model.rope_original_max_position_embeddings
    }
    if rule != "dynamic":
        low, high = turns_of(model)
        flags |= {"rope_low_freq_factor": low, "rope_high_freq_factor": high}
    given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    if rule == "yarn":
        of_length = 0.1 * math.log(factor) + 1
        given["rope_attention_factor"] = model.rope_attention_factor or of_length
        given["rope_truncation"] = model.rope_truncation
    return {"rope_scaling": factor, "rope_rule": rule, **given}


def turns_of(model: ModelConfig) -> tuple[float, float]:
    """Return the turns up to which a wavelength is stretched in full, and from which not at all."""
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    default = 32.0 if model.rope_scaling_type == "yarn" else 4.0
    return 1.0 if low is None else low, default if high is None else high


def ffn_hidden_size_of(model: ModelConfig) -> int:
    """Return the width inside the MLP."""
    return 4 * model.hidden_size if model.ffn_hidden_size is None else model.ffn_hidden_size


def head_dim_of(model: ModelConfig) -> int:
    """Return the features per attention head."""
    return model.kv_channels or model.hidden_size // max(1, model.num_attention_heads)


def num_query_groups_of(model: ModelConfig) -> int:
    """Return the number of keys and values per token."""
    if not model.group_query_attention:
        return model.num_attention_heads
    return 1 if model.num_query_groups is None else model.num_query_groups


def position_of(model: ModelConfig) -> str:
    """Return the kind of position embedding."""
    match model.position_embedding_type:
        case "rotary" | "rope":
            return "rotary"
        case "alibi" | "none" | "relative" as other:
            return other
        case str() as name if POSITION_EMBEDDINGS.is_own(name):
            return name
        case None if model.use_rotary_position_embeddings:
            return "rotary"
        case None if not model.add_position_embedding:
            return "none"
    return "learned"


def activation_of(model: ModelConfig) -> str:
    """Return the activation of the MLP."""
    if model.activation is not None:
        return model.activation
    if model.swiglu:
        return "swiglu"
    if model.glu_activation is not None:
        return model.glu_activation
    if model.squared_relu:
        return "squared_relu"
    if model.relu:
        return "relu"
    return "gelu_erf" if "erf" in gelu_forms(model).values() else "gelu_tanh"


def gelu_forms(model: ModelConfig) -> dict[str, str]:
    """Return {flag: form} of the flags that name a form of GELU."""
    forms: dict[str, str] = {"--gelu": model.gelu} if model.gelu else {}
    if model.openai_gelu:
        forms["--openai-gelu"] = "tanh"
    if model.onnx_safe in ("True", "true"):
        forms["--onnx-safe"] = "erf"
    return forms


def full_attention_layers_of(model: ModelConfig) -> tuple[int, ...]:
    """Return the numbers, from 1 on, of the layers without the window; () where all are alike.

    Raises:
        ValueError: --window-attn-skip-freq does not fit the layers.
    """
    if model.window_attn_skip_freq is None or not window_of(model.window_size):
        return ()
    return windowless_layers(model.window_attn_skip_freq, model.num_layers)
