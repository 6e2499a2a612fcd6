"""Bias, dropout and residual addition in one operation (end of attention and MLP)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.fused_kernels.reference.limits import unsupported_dtype

_MOST_ELEMENTS = 2**32 - 1  # the kernel's random offsets are 32-bit


def bias_dropout_add(
    y: Tensor, bias: Tensor | None, residual: Tensor, p: float, training: bool
) -> Tensor:
    """Return residual + dropout(y + bias). `y` may be overwritten: it must be a fresh product.

    Args:
        p: probability that a feature is dropped in training.

    Shapes: y [..., h], bias [h] or None, residual [..., h] -> [..., h]; the wider dtype of the two.
    Randomness: draws from the ordinary stream when training with p > 0.
    """
    y = y if bias is None else y.add_(bias)
    return residual + F.dropout(y, p, training)


def unsupported(dtype: torch.dtype, elements: int) -> str | None:
    """Return why the Triton kernels do not support so many elements; None if they do."""
    if elements > _MOST_ELEMENTS:
        return f"{elements} elements, the kernel takes {_MOST_ELEMENTS} at most"
    return unsupported_dtype(dtype)
