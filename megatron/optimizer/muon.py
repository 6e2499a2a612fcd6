"""Muon optimizer: orthogonalized momentum for matrices, AdamW for other parameters."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class MatrixSlice:
    """Position of a weight in a flat tensor: a matrix, or those of several experts.

    Args:
        start: index of its first element.
        shape: [rows, columns] or [experts, rows, columns] on this rank.
        dim: along which tensor parallelism shards it; None if replicated.
        group: the ranks that have the shards; None likewise.
        is_transposed: whether rows are its input features.
    """

    start: int
    shape: tuple[int, ...]
    dim: int | None
    group: dist.ProcessGroup | None
    is_transposed: bool = False

    @classmethod
    def of(cls, parameter: Tensor, start: int = 0) -> "MatrixSlice":
        """Return the position of `parameter`, whose marks say how it is laid out."""
        shard = getattr(parameter, "shard", None)
        dim = None if shard is None else shard.dim
        group = getattr(parameter, "shard_group", None)
        return cls(start, tuple(parameter.shape), dim, group, hasattr(parameter, "is_transposed"))

    @property
    def stop(self) -> int:
        """Index after its last element."""
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class FlatLayout:
    """Layout of a flat tensor of matrices, partitioned equally over `group`."""

    pieces: Sequence[MatrixSlice]
    group: dist.ProcessGroup


class Muon(torch.optim.AdamW):
    """Muon for parameter groups marked `orthogonal`, AdamW for the others.

    Orthogonalization needs full matrices: tensor-parallel shards are gathered over their ranks, and
    ZeRO's partitions of flat tensors over the replicas. Each rank orthogonalizes the matrices that
    it has elements of.

    Args:
        dtype: of the Newton-Schulz iteration.

    Communication: every step, one all-gather of each sharded matrix and one of each flat tensor.
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
        dtype: torch.dtype,
    ):
        super().__init__(params, lr=lr, betas=betas, eps=eps, fused=True)
        self._momentum, self._nesterov = momentum, nesterov
        self._steps, self._scale, self._dtype = steps, scale, dtype
        self._flat: dict[Tensor, FlatLayout] = {}

    def lay_out(self, flat: Tensor, layout: FlatLayout) -> None:
        """Register the parameter `flat` as this rank's partition of a flat tensor of matrices."""
        self._flat[flat] = layout

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
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
            # AdamW's load_state_dict, inherited here, expects a step count in every state.
            self.state[p]["step"] = torch.tensor(0.0)
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        self.state[p]["step"] += 1
        mean = self.state[p]["momentum_buffer"]
        mean.lerp_(gradient, 1 - self._momentum)
        ahead = gradient.lerp(mean, self._momentum) if self._nesterov else mean
        if p in self._flat:
            direction = self._flat_direction(ahead, self._flat[p])
        else:
            direction = self._direction(ahead, MatrixSlice.of(p))
        p.mul_(1 - lr * weight_decay).add_(direction.to(p), alpha=-lr)

    def _flat_direction(self, partition: Tensor, flat: FlatLayout) -> Tensor:
        """Return this rank's partition of the update directions of a flat tensor."""
        full = partition.new_empty(partition.numel() * flat.group.size())
        dist.all_gather_single(full, partition.contiguous(), group=flat.group)
        first = partition.numel() * flat.group.rank()
        last = first + partition.numel()
        direction = torch.zeros_like(partition)
        for piece in flat.pieces:
            low, high = max(piece.start, first), min(piece.stop, last)
            if low < high:
                matrix = full[piece.start : piece.stop].view(piece.shape)
                moved = self._direction(matrix, piece).flatten()
                direction[low - first : high - first] = moved[
                    low - piece.start : high - piece.start
                ]
        return direction

    def _direction(self, matrix: Tensor, layout: MatrixSlice) -> Tensor:
        """Return the scaled orthogonal matrix of a full matrix, or this rank's shard of it."""
        group, dim = layout.group, layout.dim
        if group is None or dim is None or group.size() == 1:
            return self._scaled_orthogonal(matrix, layout)
        shards = [matrix.new_empty(matrix.shape) for _ in range(group.size())]
        dist.all_gather(shards, matrix.contiguous(), group=group)
        direction = self._scaled_orthogonal(torch.cat(shards, dim), layout)
        return direction.chunk(group.size(), dim)[group.rank()]

    def _scaled_orthogonal(self, full: Tensor, layout: MatrixSlice) -> Tensor:
        rows, columns = full.shape[-2:]
        outputs, inputs = (columns, rows) if layout.is_transposed else (rows, columns)
        return self._scale(outputs, inputs) * orthogonalize(full, self._steps, self._dtype)


def orthogonalize(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Approximate U V^T of the singular value decomposition U S V^T of `matrix` (Newton-Schulz).

    The singular values end between 0.7 and 1.2, not at 1: the coefficients of this quintic
    Newton-Schulz iteration make small ones grow fast.

    Shapes: [..., r, c] -> [..., r, c], in `dtype`; each matrix by itself.
    Source: Jordan et al. 2024.
    """
    x = matrix.to(dtype)
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def muon_scale(mode: str, extra: float) -> Callable[[int, int], float]:
    """Return the update scale as a function of rows and columns.

    Source: Megatron-LM's `--muon-scale-mode`.
    """
    scales: dict[str, Callable[[int, int], float]] = {
        "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
        "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
        "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    }
    chosen = scales[mode]
    return lambda rows, columns: extra * chosen(rows, columns)
