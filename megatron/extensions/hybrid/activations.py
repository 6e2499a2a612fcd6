"""Activation memory of hybrid networks: bytes that the parts of layers keep for backward.

The formulas count the tensors that recurrent layers keep: operations of PyTorch on every device, in 32
bits inside of recurrences, in sequences of several chunks.
"""

from typing import Any

from megatron.extensions.hybrid.flags import HybridSpec
from megatron.extensions.hybrid.pattern import ATTENTION, CHUNK, DELTA_NET, MAMBA
from megatron.planner.activations import BYTES

_WIDE = 4  # bytes of a number inside of a recurrence


def layer_bytes(number: int, sizes: Any) -> int:
    """Return the bytes that the layer `number` keeps when nothing is recomputed.

    Args:
        sizes: a `megatron.planner.activations.Activations`.
    """
    hybrid = sizes.spec.part(HybridSpec)
    kept = sizes.norm() + sizes.dropped()
    match hybrid.kind_of(number):
        case kind if kind in (MAMBA, DELTA_NET):
            wide, narrow = (_mamba if kind == MAMBA else _delta_net)(hybrid, sizes)
            features = wide * _WIDE + narrow * _bytes(sizes)
            return int(kept + sizes.tokens * features / sizes.plan.parallel.tensor)
        case kind if kind == ATTENTION:
            return int(kept + sizes.attention() + _gates(hybrid, sizes))
    return int(kept + sizes.mlp(number))


def product_bytes(number: int, sizes: Any, rows: int) -> int:
    """Return the bytes that the weight gradients of the layer `number` are computed from.

    Args:
        rows: of a recurrent layer's input projection, and features in front of its output layer.
    """
    kind = sizes.spec.part(HybridSpec).kind_of(number)
    if kind in (MAMBA, DELTA_NET):
        streams = (sizes.outside + sizes.tokens) * sizes.spec.hidden_size
        return int((streams + sizes.tokens * rows / sizes.plan.parallel.tensor) * _bytes(sizes))
    attention = int(sizes.attention_products())
    return attention if kind == ATTENTION else int(sizes.products(number)) - attention


def _gates(hybrid: HybridSpec, sizes: Any) -> float:
    """Return the bytes of output gates, of their sigmoids and of the products with mixed values."""
    features = 3 * sizes.spec.attention.query_features if hybrid.attention_output_gate else 0
    return float(sizes.tokens * features * _bytes(sizes) / sizes.plan.parallel.tensor)


def _bytes(sizes: Any) -> int:
    return BYTES[sizes.plan.precision.dtype]


def _mamba(hybrid: HybridSpec, sizes: Any) -> tuple[float, float]:
    """Return the numbers that a token has in a layer of all ranks: in 32 bits, and in the network's dtype."""
    heads, groups = hybrid.mamba_num_heads, hybrid.mamba_num_groups
    inner, state = heads * hybrid.mamba_head_dim, hybrid.mamba_state_dim
    chunk = min(CHUNK, sizes.spec.seq_length)
    vectors = 9 * inner + 2 * (heads + groups) * state + 7 * heads + groups
    wide = 3 * heads * chunk + vectors + 2 * inner * state / chunk
    channels = inner + 2 * groups * state
    return wide, 2 * inner + _convolutions(sizes) * channels


def _delta_net(hybrid: HybridSpec, sizes: Any) -> tuple[float, float]:
    """Return the same of a layer of Gated DeltaNet."""
    heads, keys = hybrid.linear_num_value_heads, hybrid.linear_key_head_dim
    values, chunk = hybrid.linear_value_head_dim, min(CHUNK, sizes.spec.seq_length)
    all_keys = hybrid.linear_num_key_heads * keys
    vectors = heads * (6 * keys + 8 * values + 9) + 2 * all_keys
    wide = 5 * heads * chunk + vectors + heads * keys * values / chunk
    channels = 2 * all_keys + heads * values
    return wide, heads * values + _convolutions(sizes) * channels


def _convolutions(sizes: Any) -> int:
    """Return how often a convolution keeps its channels: also without other documents' tokens."""
    earlier = sizes.spec.part(HybridSpec).linear_conv_kernel_dim - 1
    return 3 + (earlier if sizes.plan.masks.isolate_documents else 0)
