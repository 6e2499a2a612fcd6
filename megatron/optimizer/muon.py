"""Muon: steps along the orthogonal matrix nearest to the momentum; AdamW for all else."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class Piece:
    """A matrix of this rank inside a flat tensor.

    Args:
        start: place of its first element.
        shape: rows and columns here.
        dim: along which the tensor-parallel ranks divide it; None for one that is whole.
    """

    start: int
    shape: tuple[int, int]
    dim: int | None

    @property
    def stop(self) -> int:
        """Place behind its last element."""
        return self.start + self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class Flat:
    """A flat tensor of matrices that `group` divides into equal pieces, in the order of its ranks."""

    pieces: Sequence[Piece]
    group: dist.ProcessGroup


class Muon(torch.optim.AdamW):
    """Muon for the groups that are marked `orthogonal`, AdamW for the others.

    An orthogonal matrix is no matter of its parts: shards are gathered over the tensor-parallel
    ranks, and matrices that ZeRO has cut out of a flat tensor over the replicas. Each rank then
    orthogonalises the matrices of which it keeps something.

    Args:
        dim_of: along which dimension the tensor-parallel ranks divide a matrix; None for whole.
        tensor_group: those ranks.
        dtype: format of the Newton-Schulz iteration.

    Communication: with every step, one all-gather of each matrix that is divided, and one of each
    flat tensor.
    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks";
    arXiv:2502.16982 for weight decay and the scale of a step.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
        nesterov: bool,
        steps: int,
        scale: Callable[[int, int], float],
        dim_of: Callable[[Tensor], int | None],
        tensor_group: dist.ProcessGroup,
        dtype: torch.dtype,
    ):
        super().__init__(params, lr=lr, betas=betas, eps=eps, fused=True)
        self._momentum, self._nesterov = momentum, nesterov
        self._steps, self._scale, self._dtype = steps, scale, dtype
        self._dim_of, self._tensor_group = dim_of, tensor_group
        self._flat: dict[Tensor, Flat] = {}

    def lay_out(self, flat: Tensor, layout: Flat) -> None:
        """Tell that the parameter `flat` is this rank's piece of a flat tensor of matrices."""
        self._flat[flat] = layout

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["orthogonal"]]
        try:
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            if group["orthogonal"]:
                for p in group["params"]:
                    if p.grad is not None:
                        self._move(p, p.grad, group["lr"], group["weight_decay"])
        return loss

    def _move(self, p: Tensor, gradient: Tensor, lr: float, weight_decay: float) -> None:
        if not self.state[p]:
            # AdamW, whose loading this class inherits, expects a count of steps in every state.
            self.state[p]["step"] = torch.tensor(0.0)
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        self.state[p]["step"] += 1
        mean = self.state[p]["momentum_buffer"]
        mean.lerp_(gradient, 1 - self._momentum)
        ahead = gradient.lerp(mean, self._momentum) if self._nesterov else mean
        if p in self._flat:
            direction = self._flat_direction(ahead, self._flat[p])
        else:
            direction = self._direction(ahead, self._dim_of(p))
        p.mul_(1 - lr * weight_decay).add_(direction.to(p), alpha=-lr)

    def _flat_direction(self, own: Tensor, flat: Flat) -> Tensor:
        """Return this rank's piece of the directions of all matrices in a flat tensor."""
        whole = own.new_empty(own.numel() * flat.group.size())
        dist.all_gather_into_tensor(whole, own.contiguous(), group=flat.group)
        first = own.numel() * flat.group.rank()
        last = first + own.numel()
        direction = torch.zeros_like(own)
        for piece in flat.pieces:
            low, high = max(piece.start, first), min(piece.stop, last)
            if low < high:
                matrix = whole[piece.start : piece.stop].view(piece.shape)
                moved = self._direction(matrix, piece.dim).flatten()
                direction[low - first : high - first] = moved[
                    low - piece.start : high - piece.start
                ]
        return direction

    def _direction(self, matrix: Tensor, dim: int | None) -> Tensor:
        """Return the scaled orthogonal matrix of a whole one, or this rank's shard of it."""
        ranks = self._tensor_group.size()
        if dim is None or ranks == 1:
            return self._scale(*matrix.shape) * orthogonalised(matrix, self._steps, self._dtype)
        shards = [matrix.new_empty(matrix.shape) for _ in range(ranks)]
        dist.all_gather(shards, matrix.contiguous(), group=self._tensor_group)
        whole = torch.cat(shards, dim)
        direction = self._scale(*whole.shape) * orthogonalised(whole, self._steps, self._dtype)
        return direction.chunk(ranks, dim)[self._tensor_group.rank()]


def orthogonalised(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Return about U V^T of the singular value decomposition U S V^T of `matrix`.

    The singular values end between 0.7 and 1.2, not at 1: the coefficients of this quintic
    Newton-Schulz iteration make small ones grow fast.

    Shapes: [r, c] -> [r, c], in `dtype`.
    Source: Jordan et al. 2024.
    """
    x = matrix.to(dtype)
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def muon_scale(mode: str, extra: float) -> Callable[[int, int], float]:
    """Return the factor of a step as a function of rows and columns.

    Source: Megatron-LM's `--muon-scale-mode`.
    """
    scales: dict[str, Callable[[int, int], float]] = {
        "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
        "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
        "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    }
    chosen = scales[mode]
    return lambda rows, columns: extra * chosen(rows, columns)
