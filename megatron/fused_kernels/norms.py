"""Normalisation of features: layer norm and root-mean-square norm."""

import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension.

    Shapes: x [..., h], weight and bias [h] -> [..., h], in the dtype of `x`.
    Source: arXiv:1607.06450, section 3.
    """
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Shapes: x [..., h], weight [h] -> [..., h], in the dtype of `x`.
    Source: arXiv:1910.07467, section 4.
    """
    return F.rms_norm(x, weight.shape, weight, eps)
