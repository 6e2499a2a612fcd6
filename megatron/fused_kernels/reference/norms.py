"""LayerNorm and RMSNorm."""

import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension.

    Shapes: x [..., h], weight and bias [h] -> [..., h], in the weight's dtype; computed in x's.
    Source: arXiv:1607.06450, section 3.
    """
    bias = None if bias is None else bias.to(x.dtype)
    return F.layer_norm(x, weight.shape, weight.to(x.dtype), bias, eps).to(weight.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Shapes: x [..., h], weight [h] -> [..., h], in the dtype of `weight`; computed in x's dtype.
    Source: arXiv:1910.07467, section 4.
    """
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps).to(weight.dtype)
