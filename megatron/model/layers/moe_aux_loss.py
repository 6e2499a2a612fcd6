"""Auxiliary losses of routers (mixture of experts), and how many tokens each expert gets."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_DROPPED, _LOSS = -2, -1
"""Columns after those of the experts."""

_TINY = 1e-300


@dataclass(frozen=True)
class ExpertLoad:
    """Loads of the experts in a step, over all replicas and micro-batches.

    Args:
        assigned: choices of each expert of each layer, [layers, experts].
        num_experts: of each layer; 1 for an ordinary MLP.
        dropped: share of the choices that an expert had no room for.
        loss: auxiliary losses of a micro-batch, summed over the layers.
    """

    assigned: Tensor
    num_experts: Sequence[int]
    dropped: float
    loss: float

    def busiest(self) -> float:
        """Return the load of the busiest expert relative to an even share."""
        return max((float(shares.max()) * len(shares) for shares in self._shares()), default=1.0)

    def entropy(self) -> float:
        """Return the entropy of the loads relative to that of even ones, of the least even layer."""
        entropies = (
            -float((shares * shares.clamp(min=_TINY).log()).sum()) / math.log(len(shares))
            for shares in self._shares()
        )
        return min(entropies, default=1.0)

    def _shares(self) -> Iterator[Tensor]:
        """Yield the shares of the choices that the experts of each layer with experts have."""
        for row, count in zip(self.assigned, self.num_experts, strict=True):
            total = row[:count].sum()
            if count > 1 and total > 0:
                yield row[:count] / total


class AuxiliaryLoss:
    """Adds the gradient of auxiliary losses to that of activations, and sums up losses and loads.

    So a term needs no way of its own to the end of the network or of a pipeline stage. The sums
    take what is computed with a gradient: recomputation, whose first forward pass keeps no graph,
    and evaluation count nothing twice.

    Args:
        num_experts: of each layer; 1 for an ordinary MLP.
    """

    def __init__(self, num_experts: Sequence[int]):
        self.num_experts = num_experts
        self.scale = 1.0
        self._sums: Tensor | None = None

    def join(self, x: Tensor, term: Tensor) -> Tensor:
        """Return x unchanged; its backward adds the gradient of scale * term.

        `scale`, read in the backward pass, is what the loss itself is multiplied by there.

        Args:
            term: a scalar.
        """
        joined: Tensor = _Join.apply(x, term, self) if term.requires_grad else x
        return joined

    @torch.no_grad()
    def add(self, number: int, *, assigned: Tensor, dropped: Tensor, loss: Tensor) -> None:
        """Add what the router of a layer has chosen for a micro-batch.

        Args:
            number: the layer's, from 1 on.
            assigned: choices of each expert, [experts].
            dropped: choices over a capacity.
            loss: the layer's auxiliary losses.
        """
        row = self._row(number, assigned.device)
        row[: len(assigned)] += assigned
        row[_DROPPED] += dropped
        row[_LOSS] += loss

    def take(self, *, counts: bool, micro_batches: int, device: torch.device) -> ExpertLoad:
        """Return the sums over all ranks since the last call, and reset them.

        Args:
            counts: whether this rank's tokens are counted on no other rank.
            micro_batches: of all replicas.

        Communication: one all-reduce over all ranks.
        """
        sums, self._sums = self._sums, None
        if sums is None or not counts:
            sums = torch.zeros(self._shape, dtype=torch.float64, device=device)
        dist.all_reduce(sums)
        sums = sums.cpu()
        assigned = sums[:, :_DROPPED]
        return ExpertLoad(
            assigned=assigned,
            num_experts=self.num_experts,
            dropped=float(sums[:, _DROPPED].sum() / assigned.sum().clamp(min=1)),
            loss=float(sums[:, _LOSS].sum()) / micro_batches,
        )

    def _row(self, number: int, device: torch.device) -> Tensor:
        if self._sums is None:
            self._sums = torch.zeros(self._shape, dtype=torch.float64, device=device)
        return self._sums[number - 1]

    @property
    def _shape(self) -> tuple[int, int]:
        return len(self.num_experts), max(self.num_experts) + 2


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
