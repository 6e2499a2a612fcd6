"""Kernels: the table of operations that layers call, and its reference implementation in torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron.fused_kernels.reference import cross_entropy, norms, softmax
from megatron.fused_kernels.reference.activations import GeluForm, GluKind, bias_gelu, glu
from megatron.fused_kernels.reference.bias_dropout_add import bias_dropout_add
from megatron.fused_kernels.reference.cross_entropy import CrossEntropy
from megatron.fused_kernels.reference.rotary import Tables, rotary, split_heads

AddNorm = Callable[
    [Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None, float, bool],
    tuple[Tensor, Tensor],
]
"""Sum of a residual and what a layer adds to it, and the sum's norm; see `Kernels`."""


SplitHeads = Callable[[Tensor, Tensor | None, Tables | None], tuple[Tensor, Tensor, Tensor]]
"""Queries, keys and values of a fused projection, turned by their positions; see the reference."""


class DecodeAttention(Protocol):
    """Attention of a decode step to cached keys, which stores the new key and value too."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: tuple[Tensor, Tensor],
        positions_b: Tensor,
        visible: range,
        *,
        window: int,
        scale: float,
        softcap: float,
        slopes_a: Tensor | None,
        sinks_a: Tensor | None,
    ) -> Tensor:
        """Return the mixed values [b, a, 1, d]; see `triton.decode_attention`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Operations that layers call; the reference functions define what each one computes.

    Args:
        linear: (x [..., in], weight [out, in]) -> x W^T [..., out], in place of torch's product in
            attention and MLP; None for torch's.
        attention: implementation in `model/layers/attention_kernels.py`.
        activation_adds_bias: whether `bias_gelu` and `glu` add a bias at less cost than the
            preceding matrix product; then layers leave the bias to them.
        split_sums_bias: whether `split_heads` sums the gradient of the product's bias at less cost than
            the product's own backward pass; then layers leave that to it.
        add_norm: (x, y or None, y_bias or None, weight, bias, eps, centred) -> (x + y + y_bias,
            its norm), with y None (x, its norm); backward adds the gradients of both results in
            one pass. None: layers add and norm one after the other.
        decode_attention: None: `megatron.inference.runner.kv_cache` stores and attends.
    """

    scaled_causal_softmax: Callable[[Tensor, float], Tensor]
    scaled_masked_softmax: Callable[[Tensor, Tensor | None, float], Tensor]
    layer_norm: Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    bias_gelu: Callable[[Tensor, Tensor | None, GeluForm], Tensor]
    bias_dropout_add: Callable[[Tensor, Tensor | None, Tensor, float, bool], Tensor]
    glu: Callable[[Tensor, Tensor | None, GluKind], Tensor]
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    split_heads: SplitHeads
    cross_entropy: CrossEntropy
    attention: str
    activation_adds_bias: bool
    split_sums_bias: bool
    add_norm: AddNorm | None = None
    decode_attention: DecodeAttention | None = None
    linear: Callable[[Tensor, Tensor], Tensor] | None = None


REFERENCE = Kernels(
    scaled_causal_softmax=softmax.scaled_causal_softmax,
    scaled_masked_softmax=softmax.scaled_masked_softmax,
    layer_norm=norms.layer_norm,
    rms_norm=norms.rms_norm,
    bias_gelu=bias_gelu,
    bias_dropout_add=bias_dropout_add,
    glu=glu,
    rotary=rotary,
    split_heads=split_heads,
    cross_entropy=cross_entropy.REFERENCE,
    attention="sdpa",
    activation_adds_bias=False,
    split_sums_bias=False,
)
"""Every operation in torch: any device, any dtype."""
