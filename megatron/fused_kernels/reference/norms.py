"""LayerNorm and RMSNorm."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.fused_kernels.reference.limits import unsupported_dtype

_MOST_FEATURES = 32768  # a row has to fit into the registers of one program


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension.

    Shapes: x [..., h], weight and bias [h] -> [..., h], in the dtype of `weight`; computed in that of x.
    Source: arXiv:1607.06450, section 3.
    """
    bias = None if bias is None else bias.to(x.dtype)
    return F.layer_norm(x, weight.shape, weight.to(x.dtype), bias, eps).to(weight.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Shapes: x [..., h], weight [h] -> [..., h], in the dtype of `weight`; computed in that of x.
    Source: arXiv:1910.07467, section 4.
    """
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps).to(weight.dtype)


def unsupported(dtype: torch.dtype, features: int) -> str | None:
    """Return why the Triton kernels do not support rows of so many features; None if they do."""
    if features > _MOST_FEATURES:
        return f"{features} features a row, the kernel takes {_MOST_FEATURES} at most"
    return unsupported_dtype(dtype)
