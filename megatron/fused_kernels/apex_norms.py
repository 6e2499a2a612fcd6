"""LayerNorm and RMSNorm kernels of the apex package."""

from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm; same result as `norms.layer_norm`."""
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    wide, dtype = weight.to(x.dtype), weight.dtype
    wide_bias = wide.new_zeros(wide.shape) if bias is None else bias.to(x.dtype)
    return fused_layer_norm_affine(x, wide, wide_bias, weight.shape, eps).to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm; same result as `norms.rms_norm`."""
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine

    normed = fused_rms_norm_affine(x, weight.to(x.dtype), weight.shape, eps)
    return normed.to(weight.dtype)
