"""What can be asked of the network itself."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network, as the user asked for it. None means "not said"; plan() decides."""

    num_layers: int
    """Number of transformer layers."""

    hidden_size: int
    """Width of the residual stream, in features."""

    num_attention_heads: int
    """Number of attention heads over all tensor-parallel ranks."""

    seq_length: int
    """Number of tokens that the network sees at once."""

    max_position_embeddings: int | None = None
    """Rows of the learned position table; at least the sequence length."""

    ffn_hidden_size: int | None = None
    """Width inside the MLP, in features; 4 * hidden_size when not said."""

    kv_channels: int | None = None
    """Features per attention head; hidden_size / num_attention_heads when not said."""

    layernorm_epsilon: float = 1e-5
    """Added to the variance in every layer norm."""

    attention_dropout: float = 0.1
    """Probability that an attention weight is dropped in training."""

    hidden_dropout: float = 0.1
    """Probability that a feature is dropped after embedding, attention and MLP in training."""

    init_method_std: float = 0.02
    """Standard deviation of the initial weights; divided by sqrt(2 * num_layers) in front of the
    residual stream."""
