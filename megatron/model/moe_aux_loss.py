"""A term of the loss that is found inside a layer."""

from typing import Any

import torch
from torch import Tensor


class AuxiliaryLoss:
    """Adds up terms for the log, and lets their gradient join that of the activations.

    So a term needs no way of its own to the end of the network, and recomputation, whose first
    forward pass keeps no graph, loses none.

    Args:
        coefficient: what every term is multiplied by.
    """

    def __init__(self, coefficient: float):
        self.coefficient = coefficient
        self.scale = 1.0
        self._terms: dict[int, Tensor] = {}

    def join(self, x: Tensor, term: Tensor, *, place: int) -> Tensor:
        """Return x as it is; behind it, backward adds the gradient of coefficient * scale * term.

        `scale`, read in the backward pass, is what the loss itself is multiplied by there.

        Args:
            term: a scalar.
            place: number of the layer. Recomputation writes the same number once more.
        """
        term = self.coefficient * term
        self._terms[place] = term.detach()
        joined: Tensor = _Join.apply(x, term, self) if term.requires_grad else x
        return joined

    def take(self) -> Tensor:
        """Return the sum of the terms since the last call: one of each layer."""
        total = torch.stack([*self._terms.values()]).sum()
        self._terms.clear()
        return total


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, term: Tensor, loss: AuxiliaryLoss) -> Tensor:
        ctx.loss = loss
        ctx.save_for_backward(term)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (term,) = ctx.saved_tensors
        return grad, torch.full_like(term, ctx.loss.scale), None
