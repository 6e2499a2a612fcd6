"""LayerNorm and RMSNorm kernels of the apex package."""

from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm; same result as `norms.layer_norm`."""
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    bias = weight.new_zeros(weight.shape) if bias is None else bias
    return fused_layer_norm_affine(x, weight, bias, weight.shape, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm; same result as `norms.rms_norm`."""
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine

    return fused_rms_norm_affine(x, weight, weight.shape, eps)
