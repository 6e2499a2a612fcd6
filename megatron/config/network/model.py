"""What can be asked of the network itself."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.config.parsing.flags import Spelling


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network, as the user asked for it."""

    num_layers: int
    """Number of transformer layers."""

    hidden_size: int
    """Width of the residual stream, in features."""

    num_attention_heads: int
    """Number of attention heads over all tensor-parallel ranks."""

    seq_length: Annotated[int, Spelling("--seq-length", ("--encoder-seq-length",))]
    """Number of tokens that the network sees at once."""

    max_position_embeddings: int | None = None
    """Most tokens that the network can be given (default: the sequence length). With learned
    positions it is the number of rows of their table."""

    ffn_hidden_size: int | None = None
    """Width inside the MLP, in features (default: 4 * hidden_size, gated or not)."""

    kv_channels: int | None = None
    """Features per attention head (default: hidden_size / num_attention_heads)."""

    group_query_attention: bool = False
    """Let several heads share one key and one value."""

    num_query_groups: Annotated[
        int | None, Spelling("--num-query-groups", ("--num-key-value-heads",))
    ] = None
    """Number of keys and values per token with --group-query-attention (default: 1)."""

    window_size: str | None = None
    """Sliding window attention, as LEFT or LEFT,0: how many tokens before itself a token sees; -1
    for all of them."""

    window_attn_skip_freq: str | None = None
    """Which layers have no window, as Megatron-LM says it: every Nth one, or a list of 1 for a
    layer with --window-size and 0 for one without, such as [1,1,1,0]*6; default: none of them."""

    apply_query_key_layer_scaling: Annotated[bool, Spelling("--no-query-key-layer-scaling")] = True
    """Attention scores divided by the number of their layer until softmax multiplies it back,
    which keeps those of deep layers inside the range of fp16. The result is the same."""

    query_pre_attn_scalar: float | None = None
    """Divide attention scores by the square root of this (default: the features per head)."""

    attn_logit_softcapping: float | None = None
    """Soft-cap attention scores: cap * tanh(score / cap), in front of the mask, as Gemma 2 does."""

    final_logit_softcapping: float | None = None
    """Soft-cap the logits of the head: cap * tanh(logit / cap), as Gemma 2 does."""

    qk_layernorm: bool = False
    """Norm every head's query and key, in front of rotary positions."""

    position_embedding_type: (
        Literal["learned_absolute", "absolute", "rotary", "rope", "alibi", "none"] | None
    ) = None
    """How a token learns its position: a learned table (learned_absolute, absolute; when not
    said), rotated queries and keys (rotary, rope), a penalty on distance (alibi), or not."""

    use_rotary_position_embeddings: bool = False
    """Megatron's older spelling of --position-embedding-type rotary."""

    add_position_embedding: Annotated[bool, Spelling("--no-position-embedding")] = True
    """The learned table of positions."""

    rotary_base: Annotated[
        float, Spelling("--rotary-base", ("--rotary-position-embeddings-theta",))
    ] = 10000.0
    """Base of the rotary wavelengths."""

    rotary_local_base: Annotated[
        float | None, Spelling("--rotary-local-base", ("--rope-local-base-freq",))
    ] = None
    """Base of the rotary wavelengths in layers with --window-size, which nothing stretches there,
    as in Gemma 3; default: layers with and without the window have the same positions."""

    rotary_percent: float = 1.0
    """Share of a head's features that rotary positions turn, from the first on."""

    rotary_seq_len_interpolation_factor: float | None = None
    """Divide rotary positions by this, to stretch a trained network to longer sequences."""

    use_rope_scaling: bool = False
    """Stretch the long wavelengths of rotary positions; as Llama 3.1 does, unless
    --rope-scaling-type names another rule."""

    rope_scaling_type: Literal["llama3", "yarn", "dynamic"] = "llama3"
    """Rule of --use-rope-scaling: that of Llama 3.1, YaRN, or dynamic NTK, which changes nothing up
    to the length that the network was trained on (farther than that it is refused)."""

    rope_scaling_factor: float = 8.0
    """By how much --use-rope-scaling stretches them."""

    rope_low_freq_factor: Annotated[
        float | None, Spelling("--rope-low-freq-factor", ("--rope-beta-slow",))
    ] = None
    """Turns within the original length up to which --use-rope-scaling stretches a wavelength in
    full; default: 1."""

    rope_high_freq_factor: Annotated[
        float | None, Spelling("--rope-high-freq-factor", ("--rope-beta-fast",))
    ] = None
    """Turns within the original length from which --use-rope-scaling leaves a wavelength alone;
    default: 4, and 32 with YaRN."""

    rope_original_max_position_embeddings: int | None = None
    """Tokens that the network was trained on before its wavelengths were stretched; default: 8192
    with the rule of Llama 3.1, the other rules need it."""

    rope_attention_factor: float | None = None
    """What YaRN multiplies turned queries and keys by; default: 0.1 ln(factor) + 1."""

    rope_truncation: Annotated[bool, Spelling("--no-rope-truncation")] = True
    """YaRN's bounds between the wavelengths rounded outward to whole pairs of features."""

    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Which norm stands in front of attention, of the MLP and of the head."""

    norm_epsilon: Annotated[float, Spelling("--layernorm-epsilon", ("--norm-epsilon",))] = 1e-5
    """Added to the variance in every norm."""

    apply_layernorm_1p: bool = False
    """Keep the weight of a norm as its difference from 1, so that weight decay and 16-bit rounding
    act around 1."""

    scale_embedding: bool = False
    """Multiply the token embedding by sqrt(hidden_size), as Gemma does."""

    embed_layernorm: bool = False
    """Norm the token embedding, in front of positions and dropout."""

    apply_residual_connection_post_layernorm: bool = False
    """Take the residual behind a layer's norms instead of in front of them."""

    sandwich_norm: bool = False
    """Norm the outputs of attention and of the MLP too, in front of the residuals, as Gemma 2
    does."""

    parallel_residual: Annotated[
        bool, Spelling("--parallel-residual", ("--use-parallel-residual",))
    ] = False
    """Let the MLP read what attention reads, and add both to it, as GPT-NeoX and Pythia do."""

    gelu: Literal["tanh", "erf"] | None = None
    """Form of GELU: the exact one (erf) or its approximation (tanh, when not said). No kernel
    changes the form."""

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

    add_bias_linear: Annotated[bool, Spelling("--disable-bias-linear")] = True
    """The biases of the linear layers."""

    add_qkv_bias: bool = False
    """Keep the bias of queries, keys and values when --disable-bias-linear takes out the others."""

    attention_bias: Literal["on", "off"] | None = None
    """Biases of attention's linear layers (queries, keys, values and output) apart from those of
    the MLP; default: both as --disable-bias-linear says."""

    untie_embeddings_and_output_weights: bool = False
    """Give the head a weight of its own instead of that of the token embedding."""

    fp32_residual_connection: bool = False
    """Keep the residual stream in 32 bits when the layers compute in 16."""

    attention_dropout: float = 0.1
    """Probability that an attention weight is dropped in training."""

    hidden_dropout: float = 0.1
    """Probability that a feature is dropped after embedding, attention and MLP in training."""

    init_method_std: float = 0.02
    """Standard deviation of the initial weights; divided by sqrt(2 * num_layers) in front of the
    residual stream."""

    init_method_xavier_uniform: bool = False
    """Draw the initial weights evenly from +-sqrt(6 / (rows + columns)) instead."""
