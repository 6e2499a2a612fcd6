"""Weights that one rank holds, by part of the network."""

from dataclasses import dataclass, replace

from megatron.config.network.model_spec import ModelSpec


@dataclass(frozen=True)
class Weights:
    """Numbers of weights: those that all replicas have, and experts, which neighbours divide."""

    dense: int
    experts: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.experts

    def __add__(self, other: "Weights") -> "Weights":
        return Weights(self.dense + other.dense, self.experts + other.experts)


def layer_weights(spec: ModelSpec, number: int, *, tensor: int, expert: int = 1) -> Weights:
    """Return the weights of the layer `number`, from 1 on, on one of `tensor` ranks.

    Matrices are divided, with the biases of what they widen; norms, the biases behind the
    narrowing matrices and routers are replicated on every rank.

    Args:
        expert: replicas that share the experts of a layer.
    """
    width, heads = spec.hidden_size, spec.num_attention_heads * spec.head_dim
    qkv = heads + 2 * spec.num_query_groups * spec.head_dim
    divided = width * (qkv + heads) + (qkv if spec.qkv_bias else 0)
    replicated = spec.norms_per_layer * norm_width(spec, width) + (
        width if spec.attention_output_bias else 0
    )
    if spec.qk_layernorm:
        replicated += 2 * norm_width(spec, spec.head_dim)
    if number > spec.num_layers:
        # Cross-attention of a decoder: its layers are numbered behind those of the encoder.
        bias = width if spec.attention_output_bias else 0
        norms = norm_width(spec, width)
        if spec.qk_layernorm:
            norms += 2 * norm_width(spec, spec.head_dim)
        divided, replicated = 2 * divided, replicated + bias + norms
    mlp = _mlp_weights(spec, tensor)
    if number in spec.retro_layers:
        plain = divided // tensor + replicated + mlp
        return Weights(plain + _retro_weights(spec, number, plain=plain, divided=divided // tensor))
    experts = spec.experts_of(number)
    if experts == 1:
        return Weights(divided // tensor + replicated + mlp)
    routing = experts * width
    if spec.residual_experts:
        routing += mlp + 2 * width + 2
    if shared := spec.shared_expert_ffn_hidden_size:
        routing += _mlp_weights(replace(spec, ffn_hidden_size=shared), tensor)
        routing += width if spec.shared_expert_gate else 0
    own = _mlp_weights(replace(spec, ffn_hidden_size=spec.expert_width), tensor)
    return Weights(divided // tensor + replicated + routing, experts // expert * own)


def _retro_weights(spec: ModelSpec, number: int, *, plain: int, divided: int) -> int:
    """Return the weights of a Retro layer on one rank beside those of a GPT's layer.

    Args:
        plain: weights of a GPT's layer on one rank.
        divided: those of them that are parts of attention's matrices.
    """
    width = spec.hidden_size
    cross = divided + norm_width(spec, width) + (width if spec.attention_output_bias else 0)
    if spec.qk_layernorm:
        cross += 2 * norm_width(spec, spec.head_dim)
    if number != spec.retro_layers[0]:
        return cross
    return 2 * cross + spec.retro_encoder_layers * plain


def _mlp_weights(spec: ModelSpec, tensor: int) -> int:
    width, inner = spec.hidden_size, spec.ffn_hidden_size * (2 if spec.is_gated else 1)
    divided = width * (inner + spec.ffn_hidden_size) + (inner if spec.linear_bias else 0)
    return divided // tensor + (width if spec.linear_bias else 0)


def embedding_weights(spec: ModelSpec, *, tensor: int) -> int:
    """Return the weights in front of the layers on one of `tensor` ranks."""
    positions = spec.max_position_embeddings if spec.position_embedding == "learned" else 0
    norm = norm_width(spec, spec.hidden_size) if spec.embed_layernorm else 0
    rows = positions + spec.num_token_types
    return head_weights(spec, tensor=tensor) + rows * spec.hidden_size + norm


def head_weights(spec: ModelSpec, *, tensor: int) -> int:
    """Return the weights of a token table on one of `tensor` ranks."""
    return spec.padded_vocab_size // tensor * spec.hidden_size


def relative_weights(spec: ModelSpec, *, tensor: int) -> int:
    """Return the biases of relative positions of one stack on one of `tensor` ranks."""
    return spec.relative_buckets * spec.num_attention_heads // tensor


def task_head(spec: ModelSpec) -> str:
    """Return the name of the layer that is the head of a downstream task."""
    if spec.architecture == "gpt":
        return "ScorePipe"
    return "LayersHeadPipe" if spec.head_layers else "ClassificationHeadPipe"


def output_weights(spec: ModelSpec, *, tensor: int) -> dict[str, int]:
    """Return what one of `tensor` ranks holds of the heads beside a token table, by layer."""
    if spec.num_outputs:
        return {task_head(spec): spec.num_head_parameters}
    if spec.architecture in ("gpt", "retro"):
        return {}
    bias = spec.padded_vocab_size
    if spec.architecture == "t5":
        return {"OutputBiasPipe": bias // tensor}
    return {
        "BertHeadPipe": spec.num_head_parameters - bias,
        "MaskedLMBiasPipe": bias // tensor,
    }


def norm_width(spec: ModelSpec, width: int) -> int:
    """Return the weights of a norm of `width` features."""
    return (2 if spec.normalization == "LayerNorm" else 1) * width
