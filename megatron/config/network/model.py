"""The network: its flags, and the parts of a spec that they decide, with every choice resolved."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from megatron.common.registry import ACTIVATIONS, NORMS, POSITION_EMBEDDINGS
from megatron.config.network.latent import LatentConfig
from megatron.config.parsing.declaration import setting

GatedActivation = Literal["geglu", "geglu_tanh", "liglu", "quick_geglu", "reglu", "swiglu"]
GATED = get_args(GatedActivation)
"""Gated activations that are built in."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(LatentConfig):
    """The network."""

    num_layers: int = setting(at_least=1, older=("--encoder-num-layers",), megatron_lm=True)
    """Number of transformer layers; in an encoder-decoder network, of the encoder."""

    hidden_size: int = setting(at_least=1, megatron_lm=True)
    """Width of the residual stream, in features."""

    num_attention_heads: int = setting(at_least=1, megatron_lm=True)
    """Number of attention heads over all tensor-parallel ranks."""

    seq_length: int = setting(
        at_least=1, older=("--encoder-seq-length",), in_weights=False, megatron_lm=True
    )
    """Sequence length: tokens of a sample."""

    max_position_embeddings: int | None = setting(None, megatron_lm=True)
    """Longest sequence of the network, in tokens (default: --seq-length). This is also the number of
    learned position embeddings."""

    ffn_hidden_size: int | None = setting(None, at_least=1, megatron_lm=True)
    """Width inside the MLP, in features (default: 4 * hidden_size, gated or not)."""

    kv_channels: int | None = setting(None, at_least=1, plan="model.head_dim", megatron_lm=True)
    """Features per attention head (default: hidden_size / num_attention_heads)."""

    group_query_attention: bool = False
    """Grouped-query attention: several query heads share one key and value head."""

    num_query_groups: int | None = setting(None, at_least=1, older=("--num-key-value-heads",))
    """Number of key and value heads with --group-query-attention (default: 1)."""

    window_size: str | None = setting(None, megatron_lm=True)
    """Sliding window attention, as LEFT or LEFT,0: number of previous tokens that a token attends
    to; -1 for all."""

    window_attn_skip_freq: str | None = setting(None, plan="model.full_attention_layers")
    """Layers with full attention (default: none), as in Megatron-LM: every N-th layer, or a list
    with 1 for a layer with --window-size and 0 for a layer without, such as [1,1,1,0]*6."""

    apply_query_key_layer_scaling: bool = setting(
        True,
        flag="--no-query-key-layer-scaling",
        plan="model.query_key_layer_scaling",
        in_weights=False,
    )
    """Do not divide attention scores by the layer number before the softmax, which multiplies it back:
    a safeguard of deep networks in fp16 that does not change the result."""

    query_pre_attn_scalar: float | None = setting(None, above=0, plan="model.query_scalar")
    """Divide attention scores by the square root of this (default: the features per head)."""

    attn_logit_softcapping: float | None = setting(None, above=0, plan="model.attention_softcap")
    """Soft-cap attention scores: cap * tanh(score / cap), before the mask, as Gemma 2 does."""

    final_logit_softcapping: float | None = setting(None, above=0, plan="model.logit_softcap")
    """Soft-cap the logits of the head: cap * tanh(logit / cap), as Gemma 2 does."""

    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = setting(
        "vanilla", megatron_lm=True
    )
    """Attention sinks: a further score of each head that no value belongs to, zero (off-by-one) or
    learned (learnable, from zero on), as gpt-oss has them (default: vanilla, without)."""

    qk_layernorm: bool = setting(False, megatron_lm=True)
    """Normalize each head's queries and keys before applying rotary embeddings."""

    qk_layernorm_across_heads: bool = setting(False, plan="model.qk_norm_across_heads")
    """With --qk-layernorm, normalize the queries of all heads together, and so the keys, as OLMo 2
    does."""

    position_embedding_type: (
        Literal[
            "learned_absolute", "absolute", "relative", "rotary", "rope", "yarn", "alibi", "none"
        ]
        | None
    ) = setting(None, names=POSITION_EMBEDDINGS, plan="model.position_embedding")
    """Position embedding: a learned table (learned_absolute or absolute, the default), rotary (rotary
    or rope; yarn: with YaRN by --rotary-scaling-factor), a penalty on distance (alibi), a learned bias for each bucket of distances (relative,
    in encoder-decoder networks), or none."""

    use_rotary_position_embeddings: bool = False
    """Megatron's older spelling of --position-embedding-type rotary."""

    add_position_embedding: bool = setting(True, flag="--no-position-embedding")
    """Do not add learned position embeddings to the token embeddings."""

    rotary_base: float = setting(
        10000.0,
        above=0,
        matters=False,
        older=("--rotary-position-embeddings-theta",),
        megatron_lm=True,
    )
    """Base of rotary embeddings (theta)."""

    rotary_local_base: float | None = setting(
        None, above=0, matters=False, older=("--rope-local-base-freq",)
    )
    """Rotary base of layers with --window-size, without RoPE scaling, as in Gemma 3 (default: that
    of layers without the window, with its scaling)."""

    no_rope_freq: str | None = setting(None, plan="model.unrotated_layers")
    """Layers without rotary embeddings (NoPE; default: none), as in Megatron-LM: every N-th layer,
    or a list with 1 for a layer without and 0 for a layer with them, such as [0,0,0,1]*6."""

    rotary_percent: float = setting(1.0, above=0, matters=False, at_most=1, megatron_lm=True)
    """Fraction of each head's features that rotary embeddings rotate, from the first on."""

    rotary_seq_len_interpolation_factor: float | None = setting(
        None, above=0, matters=False, plan="model.rotary_interpolation", megatron_lm=True
    )
    """Divide rotary positions by this (position interpolation), to extend a trained network to
    longer sequences."""

    use_rope_scaling: bool = setting(False, megatron_lm=True)
    """Apply RoPE scaling to long wavelengths: Llama 3.1's, unless --rope-scaling-type selects
    another kind."""

    rope_scaling_type: Literal["llama3", "yarn", "dynamic", "longrope"] = setting(
        "llama3", plan="model.rope_rule"
    )
    """Kind of --use-rope-scaling: Llama 3.1's, YaRN, dynamic NTK, which changes nothing up to the
    original length (longer sequences are refused), or LongRoPE with its two lists of factors."""

    rope_short_factors: list[float] | None = setting(None, above=0)
    """Factors of the wavelengths with LongRoPE, one for each rotated pair of features, where
    --seq-length is at most --rope-original-max-position-embeddings."""

    rope_long_factors: list[float] | None = setting(None, above=0)
    """The same where --seq-length is more."""

    rope_scaling_factor: float = setting(
        8.0, above=0, matters=False, plan="model.rope_scaling", megatron_lm=True
    )
    """Factor by which --use-rope-scaling stretches wavelengths."""

    rope_low_freq_factor: float | None = setting(
        None, above=0, older=("--rope-beta-slow", "--yarn-beta-slow")
    )
    """Wavelengths with at most this many rotations in the original length are scaled in full
    (default: 1)."""

    rope_high_freq_factor: float | None = setting(
        None, above=0, older=("--rope-beta-fast", "--yarn-beta-fast")
    )
    """Wavelengths with at least this many rotations in the original length are not scaled (default:
    4; 32 with YaRN)."""

    rope_original_max_position_embeddings: int | None = setting(
        None,
        above=0,
        older=("--yarn-original-max-position-embeddings",),
        plan="model.rope_original_length",
    )
    """Sequence length of the training before RoPE scaling (default: 8192 for Llama 3.1's; required
    for the others)."""

    rope_attention_factor: float | None = setting(None, above=0)
    """Factor of rotated queries and keys with YaRN (default: 0.1 ln(factor) + 1) and LongRoPE
    (default: sqrt(1 + ln(factor) / ln(original length)))."""

    rope_truncation: bool = setting(
        True, older=("--no-yarn-correction-range-round-to-int",), plan="model.rope_truncation"
    )
    """Do not round the bounds of YaRN's correction range to integer dimensions."""

    normalization: str = setting("LayerNorm", names=NORMS, megatron_lm=True)
    """Norm before attention, the MLP and the output head."""

    norm_epsilon: float = setting(
        1e-5, above=0, flag="--layernorm-epsilon", older=("--norm-epsilon",)
    )
    """Added to the variance in every norm."""

    apply_layernorm_1p: bool = setting(False, plan="model.layernorm_1p", megatron_lm=True)
    """Store the weight of a norm as its difference from 1, so that weight decay and 16-bit rounding
    are relative to 1."""

    scale_embedding: bool = setting(False, plan="model.scaled_embedding")
    """Multiply the token embedding by sqrt(hidden_size), as Gemma does."""

    embedding_multiplier: float = setting(1.0, above=0)
    """Multiply the token embedding by this, as Granite does."""

    residual_multiplier: float = setting(1.0, above=0)
    """Multiply the outputs of attention and MLP by this before the residual additions, as Granite
    does."""

    logits_scaling: float = setting(1.0, above=0, plan="model.logit_divisor")
    """Divide the logits by this, before --final-logit-softcapping, as Granite does."""

    embed_layernorm: bool = setting(False, megatron_lm=True)
    """Normalize the token embeddings before positions and dropout."""

    apply_residual_connection_post_layernorm: bool = setting(
        False, plan="model.residual_after_norm", megatron_lm=True
    )
    """Take the residual after the layer norm instead of before it."""

    sandwich_norm: bool = False
    """Also normalize attention and MLP outputs before the residual additions, as Gemma 2 does."""

    input_norm: bool = setting(True, plan="model.input_norm")
    """Do not normalize the inputs of attention and MLP, only their outputs (with --sandwich-norm), as
    OLMo 2 does."""

    parallel_residual: bool = setting(False, older=("--use-parallel-residual",))
    """Parallel residual: compute attention and MLP from the same input and add both, as GPT-NeoX
    and Pythia do."""

    gelu: Literal["tanh", "erf"] | None = None
    """Form of GELU: exact (erf) or approximate (tanh, the default). No kernel changes the form."""

    openai_gelu: bool = False
    """Megatron's spelling of --gelu tanh."""

    onnx_safe: Literal["True", "False", "true", "false"] | None = None
    """Megatron's spelling of --gelu erf, when true."""

    glu_activation: GatedActivation | None = setting(None, megatron_lm=True)
    """Gated MLP: activation of the gate, GELU (erf, tanh, or x * sigmoid(1.702 x): quick), identity,
    ReLU or SiLU. --ffn-hidden-size is the width of the gate and of the features that it multiplies, each."""

    swiglu: bool = setting(False, megatron_lm=True)
    """Megatron's spelling of --glu-activation swiglu."""

    quick_geglu: bool = setting(False, megatron_lm=True)
    """Megatron's spelling of --glu-activation quick_geglu."""

    activation_func_clamp_value: float | None = setting(
        None, above=0, plan="model.glu_clamp", megatron_lm=True
    )
    """Clamp a gated MLP before its activation: the gate to at most this, what it multiplies to plus or
    minus this, as gpt-oss does."""

    glu_linear_offset: float = setting(0.0, plan="model.glu_offset", megatron_lm=True)
    """Add this to what the gate of a gated MLP multiplies, behind the clamp; gpt-oss: 1."""

    squared_relu: bool = setting(False, megatron_lm=True)
    """Squared ReLU in the MLP instead of GELU."""

    relu: bool = False
    """ReLU in the MLP instead of GELU."""

    activation: str | None = setting(None, names=ACTIVATIONS)
    """Activation of the MLP by name, built in or of a plugin (default: by the flags above, else
    GELU)."""

    add_bias_linear: bool = setting(True, flag="--disable-bias-linear", plan="model.linear_bias")
    """Build the linear layers without biases."""

    add_qkv_bias: bool = setting(False, plan="model.qkv_bias", megatron_lm=True)
    """Keep the bias of queries, keys and values with --disable-bias-linear."""

    attention_bias: Literal["on", "off"] | None = setting(None, plan="model.attention_bias_apart")
    """Biases of attention's linear layers (queries, keys, values and output), independent of the
    MLP's (default: both as with --disable-bias-linear)."""

    untie_embeddings_and_output_weights: bool = setting(
        False, plan="not model.tied_embeddings", megatron_lm=True
    )
    """Give the output head its own weight instead of sharing the token embedding's."""

    fp32_residual_connection: bool = setting(
        False, plan="model.fp32_residual", in_weights=False, megatron_lm=True
    )
    """Keep the residual stream in 32 bits when the layers compute in 16."""

    attention_dropout: float = setting(0.1, at_least=0, below=1, in_weights=False, megatron_lm=True)
    """Probability that an attention weight is dropped in training."""

    hidden_dropout: float = setting(0.1, at_least=0, below=1, in_weights=False, megatron_lm=True)
    """Probability that a feature is dropped after embedding, attention and MLP in training."""

    init_method_std: float = setting(
        0.02, above=0, plan="model.init_std", in_weights=False, megatron_lm=True
    )
    """Standard deviation of the initial weights; divided by sqrt(2 * num_layers) for
    projections into the residual stream."""

    init_method_xavier_uniform: bool = setting(False, plan="model.init", in_weights=False)
    """Draw the initial weights uniformly from +-sqrt(6 / (rows + columns)) instead."""


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Self-attention."""

    num_attention_heads: int
    num_query_groups: int  # keys and values per token
    head_dim: int
    attention_dropout: float
    window: int  # most tokens that a token sees, itself included; 0: no limit
    full_attention_layers: tuple[int, ...] = ()  # layer numbers, from 1 on, without the window
    query_key_layer_scaling: bool
    query_scalar: float = 0.0  # scores are divided by its square root; 0: head_dim
    attention_softcap: float = 0.0  # bound of scores; 0: none
    softmax_type: str = "vanilla"  # off-by-one, learnable: with a sink of each head
    qkv_bias: bool
    attention_bias_apart: bool = False  # attention's output has a bias where the MLP has none
    qkv_layout: str = "group, {queries, key, value}, head_dim"  # rows of the fused weight
    attention: str = ""  # name of a plugin's; "": softmax attention, by the kernels of the run

    @property
    def query_features(self) -> int:
        """Features of the queries of a token, over all heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_features(self) -> int:
        """Features of the keys of a token, and as many of the values."""
        return self.num_query_groups * self.head_dim

    @property
    def has_sinks(self) -> bool:
        """Whether each head has a score without a key."""
        return self.softmax_type != "vanilla"

    @property
    def scale(self) -> float:
        """Factor of the attention scores."""
        return (self.query_scalar or self.head_dim) ** -0.5

    def window_of(self, number: int) -> int:
        """Return the window of the layer `number`, from 1 on; 0 for no limit."""
        return 0 if number in self.full_attention_layers else self.window


@dataclass(frozen=True, kw_only=True)
class VocabularySpec:
    """The table of tokens, and the logits."""

    vocab_size: int  # rows of the token table that are no padding
    padded_vocab_size: int  # rows of the token table
    padded_vocab_in_softmax: bool = False  # whether the loss counts the columns of padding
    tied_embeddings: bool
    scaled_embedding: bool = False  # the token embedding is multiplied by sqrt(hidden_size)
    logit_softcap: float = 0.0  # bound of logits; 0: none
    embedding_multiplier: float = 1.0  # of the token embedding, scaled or not
    logit_divisor: float = 1.0  # of the logits, before the bound

    def in_equal_shards(self, tensor: int) -> "VocabularySpec":
        """Return this with as many rows on each of `tensor` ranks; the padding has no token."""
        return replace(self, padded_vocab_size=-(-self.padded_vocab_size // tensor) * tensor)

    def with_softmax(self, *, counts_padding: bool) -> "VocabularySpec":
        """Return this with or without the columns of padding in the loss, if there are any."""
        counts = counts_padding and self.padded_vocab_size > self.vocab_size
        return replace(self, padded_vocab_in_softmax=counts)


@dataclass(frozen=True, kw_only=True)
class PositionSpec:
    """Positions of tokens, and what attention makes of them."""

    max_position_embeddings: int  # most tokens at once; rows of the table when it is learned
    position_embedding: str  # learned, relative, rotary, alibi, none, or the name of a plugin's
    rotary_dim: int  # features of a head that are turned; 0 without rotary positions
    rotary_base: float
    rotary_interpolation: float  # positions are divided by it
    rope_scaling: float  # by how much `rope_rule` stretches long wavelengths; 1: not at all
    rope_rule: Literal["llama3", "yarn", "dynamic", "longrope"] = "llama3"  # which way to stretch
    rope_low_freq_factor: float = 1.0  # turns up to which a wavelength is stretched in full
    rope_high_freq_factor: float = 4.0  # turns from which a wavelength is left alone
    rope_original_length: int = 8192  # tokens within which turns are counted
    rope_attention_factor: float = 1.0  # of turned queries and of turned keys
    rope_truncation: bool = True  # YaRN's bounds are rounded outward to full pairs
    rope_short_factors: tuple[float, ...] = ()  # LongRoPE's, by pair, within rope_original_length
    rope_long_factors: tuple[float, ...] = ()  # the same for longer samples
    rotary_local_base: float = 0.0  # of layers with the window, unscaled; 0: rotary_base
    unrotated_layers: tuple[int, ...] = ()  # layer numbers, from 1 on, without rotary positions
    relative_buckets: int = 0  # of relative positions; 0 with other positions
    relative_max_distance: int = 0  # from which distances share the last bucket

    @property
    def reach_attention(self) -> bool:
        """Whether attention needs the positions of tokens: rotary positions, and a plugin's."""
        return self.position_embedding not in ("learned", "relative", "alibi", "none")

    def within(self, length: int) -> "PositionSpec":
        """Return the positions in samples of `length`: the one of LongRoPE's two lists that holds then."""
        if not self.rope_short_factors:
            return self
        is_short = length <= self.rope_original_length
        factors = self.rope_short_factors if is_short else self.rope_long_factors
        return replace(self, rope_short_factors=factors, rope_long_factors=factors)


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """Norms: their kind, and where they are."""

    normalization: str
    norm_epsilon: float
    layernorm_1p: bool
    embed_layernorm: bool
    qk_layernorm: bool
    residual_after_norm: bool
    sandwich_norm: bool = False  # outputs of attention and of the MLP are normed too
    input_norm: bool = True  # inputs of attention and of the MLP are normed
    qk_norm_across_heads: bool = False  # queries of all heads are normed together, and so are keys

    @property
    def per_layer(self) -> int:
        """Norms of the residual stream's width in each layer."""
        return 2 * (self.input_norm + self.sandwich_norm)


@dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """The MLP, also of an expert unless experts have another width."""

    ffn_hidden_size: int
    activation: str
    linear_bias: bool  # of the MLP, and of attention's output unless that is apart
    mlp_layout: str = "feature, {gate, up}"  # rows of a gated MLP's first weight
    glu_clamp: float = 0.0  # bound of a gate and of what it multiplies; 0: none
    glu_offset: float = 0.0  # added to what a gate multiplies

    @property
    def is_gated(self) -> bool:
        """Whether one half of the MLP's inner features multiplies the other."""
        return "glu" in self.activation

    @property
    def changes_pairs(self) -> bool:
        """Whether gates and what they multiply are clamped or shifted."""
        return bool(self.glu_clamp or self.glu_offset)

    @property
    def is_composed(self) -> bool:
        """Whether no fused kernel has its activation, which is several operations then."""
        return self.activation == "quick_geglu" or self.changes_pairs

    @property
    def inner_features(self) -> int:
        """Features before the activation; a gate halves their number."""
        return self.ffn_hidden_size * (2 if self.is_gated else 1)
