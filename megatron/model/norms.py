"""Norms of the residual stream, computed by the chosen kernels."""

from torch import Tensor, nn

from megatron.fused_kernels.dispatch import REFERENCE, Kernels


class LayerNorm(nn.LayerNorm):
    """Layer norm over the last dimension.

    Args:
        width: number of features.
        eps: added to the variance.
        kernels: what computes it.

    Shapes: x [..., h] -> [..., h].
    """

    def __init__(self, width: int, *, eps: float, kernels: Kernels = REFERENCE):
        super().__init__(width, eps=eps)
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps)
