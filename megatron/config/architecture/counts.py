"""Weights and floating-point operations of the parts that networks are made of."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.architecture.attention_form import attention_form
from megatron.config.network.experts import MoESpec
from megatron.config.network.model_spec import ModelSpec
from megatron.config.parallelism.recompute_plan import RecomputePlan


@dataclass(frozen=True)
class Weights:
    """Numbers of weights: replicated ones, and experts, which expert-parallel ranks divide."""

    dense: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.experts

    def __sub__(self, other: "Weights") -> "Weights":
        return Weights(self.dense - other.dense, self.experts - other.experts)

    def __add__(self, other: "Weights") -> "Weights":
        return Weights(self.dense + other.dense, self.experts + other.experts)


@dataclass(frozen=True)
class Branches:
    """How often layers add to the residual stream.

    Args:
        attention: outputs of self-attention.
        others: outputs of anything else: an MLP, experts, a recurrence, cross-attention.
    """

    attention: int = 1
    others: int = 1

    @property
    def total(self) -> int:
        """All of them."""
        return self.attention + self.others

    def __add__(self, other: "Branches") -> "Branches":
        return Branches(self.attention + other.attention, self.others + other.others)


def block_weights(spec: ModelSpec, number: int, *, tensor: int, expert: int = 1) -> Weights:
    """Return the weights of the layer `number`, from 1 on, on one of `tensor` ranks.

    Matrices are divided, with the biases of what they widen; norms, the biases after the
    narrowing matrices and routers are replicated on every rank.

    Args:
        expert: replicas that share the experts of a layer.
    """
    width, mlp = spec.hidden_size, mlp_weights(spec, tensor)
    dense = attention_weights(spec, tensor) + spec.norm.per_layer * norm_width(spec, width)
    experts, moe = spec.experts_of(number), spec.part(MoESpec)
    if experts == 1:
        return Weights(dense + mlp)
    routing = experts * (width + moe.router_linear_bias)
    if moe.residual_experts:
        routing += mlp + 2 * width + 2
    if shared := moe.shared_expert_ffn_hidden_size:
        routing += mlp_weights(spec, tensor, features=shared)
        routing += width if moe.shared_expert_gate else 0
    expert_mlp = mlp_weights(spec, tensor, features=spec.expert_width)
    return Weights(dense + routing, experts // expert * expert_mlp)


def attention_weights(spec: ModelSpec, tensor: int) -> int:
    """Return the weights of attention on one of `tensor` ranks, with the norms in it."""
    form = attention_form(spec)
    norms = sum(norm_width(spec, width) for width in form.norms)
    if spec.norm.qk_norm_across_heads:
        norms = (spec.attention.query_features + spec.attention.key_features) // tensor
    has_sinks = spec.attention.softmax_type == "learnable"
    sinks = spec.attention.num_attention_heads // tensor if has_sinks else 0
    return sum(product.weights(tensor) for product in form.products) + norms + sinks


def mlp_weights(spec: ModelSpec, tensor: int, *, features: int = 0) -> int:
    """Return the weights of an MLP on one of `tensor` ranks.

    Args:
        features: inner ones, if they are not as many as usual.
    """
    width, features = spec.hidden_size, features or spec.mlp.ffn_hidden_size
    inner = features * (2 if spec.mlp.is_gated else 1)
    divided = width * (inner + features) + (inner if spec.mlp.linear_bias else 0)
    return divided // tensor + (width if spec.mlp.linear_bias else 0)


def embedding_weights(spec: ModelSpec, *, tensor: int) -> Weights:
    """Return the weights of an embedding on one of `tensor` ranks."""
    own, width = spec.positions, spec.hidden_size
    rows = own.max_position_embeddings if own.position_embedding == "learned" else 0
    norm = norm_width(spec, width) if spec.norm.embed_layernorm else 0
    return Weights(table_weights(spec, tensor=tensor) + rows * width + norm)


def table_weights(spec: ModelSpec, *, tensor: int) -> int:
    """Return the weights of a token table on one of `tensor` ranks."""
    return spec.vocabulary.padded_vocab_size // tensor * spec.hidden_size


def norm_weights(spec: ModelSpec) -> Weights:
    """Return the weights of a norm of the residual stream."""
    return Weights(norm_width(spec, spec.hidden_size))


def norm_width(spec: ModelSpec, width: int) -> int:
    """Return the weights of a norm of `width` features."""
    return (2 if spec.norm.normalization == "LayerNorm" else 1) * width


def dense_weights(spec: ModelSpec) -> int:
    """Return the weights of a linear layer with a bias, as wide as the residual stream."""
    return spec.hidden_size**2 + spec.hidden_size


def stack_flops(
    spec: ModelSpec, recompute: RecomputePlan, numbers: Sequence[int] | None = None
) -> float:
    """Return half the operations of forward and backward of the layers of a stack, for one token.

    Two for every weight of a matrix and token, and for every feature of every visible key and
    value; masked halves of attention are counted, as usual. Backward is twice forward, and
    recomputation another forward of what it computes again: layers or attention, not the head.

    Args:
        numbers: of the layers (default: all).

    Source: arXiv:2104.04473, section 5.1 and appendix; for multi-head attention with an MLP
    four times as wide it is their formula (3).
    """
    numbers = range(1, spec.num_layers + 1) if numbers is None else numbers
    visible = sum(visible_keys(spec, number) for number in numbers)
    attention = core_features(spec) * visible
    forward = (
        len(numbers) * attention_matrices(spec)
        + attention
        + sum(mlp_products(spec, number) for number in numbers)
    )
    layers = (3 + recompute.share) * forward
    return layers + (attention if recompute.granularity == "selective" else 0)


def mlp_products(spec: ModelSpec, number: int) -> int:
    """Return the weights of the matrices that a token passes in the MLP or experts of a layer."""
    experts, mlp = spec.experts_of(number), mlp_matrices(spec)
    if experts == 1:
        return mlp
    moe = spec.part(MoESpec)
    one = mlp // spec.mlp.ffn_hidden_size
    residual = mlp + 2 * spec.hidden_size if moe.residual_experts else 0
    shared = one * moe.shared_expert_ffn_hidden_size
    gate = spec.hidden_size if moe.shared_expert_gate else 0
    routing = experts * spec.hidden_size + residual + shared + gate
    return moe.experts_per_token * one * spec.expert_width + routing


def attention_matrices(spec: ModelSpec) -> int:
    """Return the weights of the matrices of attention."""
    return sum(product.matrix for product in attention_form(spec).products)


def visible_keys(spec: ModelSpec, number: int) -> int:
    """Return the most keys that a query sees in attention of the layer `number`, from 1 on."""
    return min(spec.seq_length, spec.attention.window_of(number) or spec.seq_length)


def core_features(spec: ModelSpec) -> int:
    """Return the features, over all heads, of a key and a value of attention's core."""
    return spec.attention.query_features + attention_form(spec).value_features


def key_matrices(spec: ModelSpec) -> int:
    """Return the weights of the matrices of multi-head attention that make keys and values."""
    return 2 * spec.attention.key_features * spec.hidden_size


def mlp_matrices(spec: ModelSpec) -> int:
    """Return the weights of the two matrices of an MLP."""
    return spec.hidden_size * spec.mlp.ffn_hidden_size * (3 if spec.mlp.is_gated else 2)
