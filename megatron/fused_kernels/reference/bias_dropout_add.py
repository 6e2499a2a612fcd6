"""Bias, dropout and residual addition in one operation (end of attention and MLP)."""

import torch.nn.functional as F
from torch import Tensor


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
