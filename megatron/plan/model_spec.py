"""The network, decided: every size is a number."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.model import ModelConfig
from megatron.config.tokenizer import TokenizerConfig


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What layers are built from. Two checkpoints with equal specs hold the same network."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    head_dim: int
    seq_length: int
    max_position_embeddings: int
    vocab_size: int  # what the tokenizer knows
    padded_vocab_size: int  # rows of the embedding
    layernorm_epsilon: float
    attention_dropout: float
    hidden_dropout: float
    init_std: float
    qkv_layout: str = "head, {q,k,v}, head_dim"

    @property
    def num_parameters(self) -> int:
        """Weights of the whole network; the tied embedding is counted once."""
        position = self.max_position_embeddings * self.hidden_size
        return (
            self.num_parameters_without_embeddings
            + position
            + (self.padded_vocab_size * self.hidden_size)
        )

    @property
    def num_parameters_without_embeddings(self) -> int:
        """Weights of the transformer layers and the final norm."""
        h, f, attention = self.hidden_size, self.ffn_hidden_size, self._attention_width
        attention_weights = 3 * attention * (h + 1) + h * (attention + 1)
        mlp_weights = f * (h + 1) + h * (f + 1)
        return self.num_layers * (attention_weights + mlp_weights + 4 * h) + 2 * h

    def flops_per_sample(self, *, recompute: bool) -> float:
        """Return floating-point operations of forward and backward on one sample.

        Source: arXiv:2104.04473, section 5.1 (with recomputation: four passes instead of three).
        """
        s, h, layers = self.seq_length, self.hidden_size, self.num_layers
        passes = 4 if recompute else 3
        relative = 1 + s / (6 * h) + self.padded_vocab_size / (16 * layers * h)
        return 24 * passes * s * layers * h**2 * relative

    @property
    def _attention_width(self) -> int:
        return self.num_attention_heads * self.head_dim


def plan_model(
    model: ModelConfig, tokenizer: TokenizerConfig, *, vocab_size: int, tensor: int
) -> ModelSpec:
    """Return the decided network for a tokenizer of `vocab_size` tokens."""
    return ModelSpec(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=_ffn_hidden_size(model),
        num_attention_heads=model.num_attention_heads,
        head_dim=model.kv_channels or model.hidden_size // model.num_attention_heads,
        seq_length=model.seq_length,
        max_position_embeddings=model.max_position_embeddings or model.seq_length,
        vocab_size=vocab_size,
        padded_vocab_size=padded_vocab_size(
            vocab_size,
            divisible_by=tokenizer.make_vocab_size_divisible_by,
            tensor=tensor,
            pad_to=tokenizer.pad_vocab_size_to,
        ),
        layernorm_epsilon=model.layernorm_epsilon,
        attention_dropout=model.attention_dropout,
        hidden_dropout=model.hidden_dropout,
        init_std=model.init_method_std,
    )


def padded_vocab_size(
    vocab_size: int, *, divisible_by: int, tensor: int, pad_to: int | None = None
) -> int:
    """Return `pad_to`, or the next multiple of `divisible_by` * `tensor` from `vocab_size` up.

    >>> padded_vocab_size(50257, divisible_by=128, tensor=2)
    50432
    """
    multiple = divisible_by * tensor
    return pad_to or -(-vocab_size // multiple) * multiple


def model_problems(model: ModelConfig, *, tensor: int) -> Iterator[str]:
    """Yield every reason why this network cannot be built or divided."""
    for flag, value in (
        ("--num-layers", model.num_layers),
        ("--hidden-size", model.hidden_size),
        ("--num-attention-heads", model.num_attention_heads),
        ("--seq-length", model.seq_length),
        ("--ffn-hidden-size", _ffn_hidden_size(model)),
        ("--kv-channels", 1 if model.kv_channels is None else model.kv_channels),
    ):
        if value < 1:
            yield f"{flag} {value} must be at least 1"
            return
    for flag, probability in (
        ("--attention-dropout", model.attention_dropout),
        ("--hidden-dropout", model.hidden_dropout),
    ):
        if not 0 <= probability < 1:
            yield f"{flag} {probability} must be at least 0 and less than 1"
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        yield (
            f"--hidden-size {model.hidden_size} is not a multiple of --num-attention-heads "
            f"{model.num_attention_heads}; change one of them or give --kv-channels"
        )
    if model.num_attention_heads % tensor:
        yield _indivisible("--num-attention-heads", model.num_attention_heads, tensor)
    if _ffn_hidden_size(model) % tensor:
        yield _indivisible("--ffn-hidden-size", _ffn_hidden_size(model), tensor)
    positions = model.max_position_embeddings
    if positions is not None and positions < model.seq_length:
        yield (
            f"--max-position-embeddings {positions} is less than --seq-length {model.seq_length}; "
            "every position needs a row"
        )


def vocab_problems(tokenizer: TokenizerConfig, *, vocab_size: int, tensor: int) -> Iterator[str]:
    """Yield every reason why the vocabulary cannot be padded and divided as asked."""
    pad_to, divisor = tokenizer.pad_vocab_size_to, tokenizer.make_vocab_size_divisible_by
    if divisor < 1:
        yield f"--make-vocab-size-divisible-by {divisor} must be at least 1"
    elif pad_to is not None:
        if pad_to < vocab_size:
            yield f"--pad-vocab-size-to {pad_to} is less than the tokenizer's {vocab_size} tokens"
        if pad_to % divisor:
            yield (
                f"--pad-vocab-size-to: {pad_to} is not divisible by {divisor} "
                "(--make-vocab-size-divisible-by)"
            )
        if pad_to % tensor:
            yield _indivisible("--pad-vocab-size-to", pad_to, tensor)


def _ffn_hidden_size(model: ModelConfig) -> int:
    return 4 * model.hidden_size if model.ffn_hidden_size is None else model.ffn_hidden_size


def _indivisible(flag: str, value: int, tensor: int) -> str:
    return f"{flag} {value} is not a multiple of --tensor-model-parallel-size {tensor}"
