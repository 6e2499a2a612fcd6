"""Deferred weight gradients of linear layers: the second half of a split backward pass (zero bubble)."""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor, nn

Product = Callable[[], Tensor]
"""Computes a weight gradient from what it keeps: rows of an output gradient and of an input."""


class WeightGradients:
    """Weight gradients that backward passes have put aside, by pass, oldest first.

    They reach the weights through autograd, so that hooks run as in any backward pass.

    Source: arXiv:2401.10241, section 2.
    """

    def __init__(self) -> None:
        self._passes: deque[list[tuple[nn.Parameter, Product]]] = deque()
        self._current: list[tuple[nn.Parameter, Product]] = []

    def __len__(self) -> int:
        """Return the number of passes whose weight gradients are still to be computed."""
        return len(self._passes)

    def defer(self, weight: nn.Parameter, product: Product) -> None:
        """Put aside the product that the backward pass in hand adds to the gradient of `weight`."""
        self._current.append((weight, product))

    def end_pass(self) -> None:
        """End a backward pass; what has been put aside since the last one belongs to it."""
        self._passes.append(self._current)
        self._current = []

    def compute(self) -> None:
        """Compute the weight gradients of the oldest pass, and let go of what they are computed from."""
        products = self._passes.popleft()
        products.reverse()
        while products:
            weight, product = products.pop()
            with torch.no_grad():
                gradient = product()
            with torch.enable_grad():
                used = weight.view_as(weight)
            used.backward(gradient)
