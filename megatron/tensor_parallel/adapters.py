"""LoRA: tensor-parallel linear layers with a low-rank adapter, y = x W^T + scale (x A^T) B^T.

A is [rank, in] and B [out, rank]; B starts as 0. They are parameters of the layer itself, so the
weight keeps its name and checkpoints without adapters load. Source: arXiv:2106.09685, section 4.1.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.tensor_parallel.collectives import (
    copy_to_tensor_parallel,
    reduce_from_tensor_parallel,
    scatter_sequence,
)
from megatron.tensor_parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    gathering_linear,
)
from megatron.tensor_parallel.rng import RngTracker
from megatron.tensor_parallel.sharding import mark_sharded

DOWN, UP = "lora_A", "lora_B"
"""Names of the two matrices, as in PEFT."""


@dataclass(frozen=True)
class Adapter:
    """Hyperparameters of a LoRA adapter.

    Args:
        rank: features between the two matrices.
        scale: factor of their product.
        dropout: probability of dropping a feature of x before A.
        rng: RNG state that differs between tensor-parallel ranks.
    """

    rank: int
    scale: float
    dropout: float
    rng: RngTracker


def is_adapter(name: str) -> bool:
    """Whether a parameter name belongs to a LoRA adapter."""
    return name.endswith((f".{DOWN}", f".{UP}"))


class AdaptedColumnParallelLinear(ColumnParallelLinear):
    """ColumnParallelLinear with a LoRA adapter: A is replicated, B sharded like the weight.

    Communication: that of the layer, and one all-reduce of [s, b, rank] backward. With sequence
        parallelism an all-gather of it forward, backward another and a reduce-scatter.
    Randomness: dropout draws from the default RNG state: ranks with the same tokens drop the same
        features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: dist.ProcessGroup,
        adapter: Adapter,
        **options: Any,
    ):
        super().__init__(in_features, out_features, group=group, **options)
        self.adapter = adapter
        self.lora_A = nn.Parameter(torch.empty(adapter.rank, in_features))
        self.lora_B = mark_sharded(
            nn.Parameter(torch.zeros(len(self.weight), adapter.rank)), 0, group
        )

    def forward(self, x: Tensor) -> Tensor:
        down = F.linear(F.dropout(x, self.adapter.dropout, self.training), self.lora_A)
        if self.sequence_parallel:
            up = gathering_linear(down, self.lora_B, None, dim=0, group=self.group)
        else:
            up = F.linear(copy_to_tensor_parallel(down, self.group), self.lora_B)
        return super().forward(x) + self.adapter.scale * up


class AdaptedRowParallelLinear(RowParallelLinear):
    """RowParallelLinear with a LoRA adapter: A is sharded like the weight, B replicated.

    Communication: that of the layer, and one all-reduce of [s, b, rank] forward. With sequence
        parallelism a reduce-scatter of it forward, an all-gather backward.
    Randomness: dropout draws from the tensor-parallel RNG state, because each rank has other
        features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: dist.ProcessGroup,
        adapter: Adapter,
        **options: Any,
    ):
        super().__init__(in_features, out_features, group=group, **options)
        self.adapter = adapter
        local_features = self.weight.shape[1]
        self.lora_A = mark_sharded(
            nn.Parameter(torch.empty(adapter.rank, local_features)), 1, group
        )
        self.lora_B = nn.Parameter(torch.zeros(out_features, adapter.rank))

    def forward(self, x: Tensor) -> Tensor:
        share = self.adapter.dropout if self.training else 0.0
        with self.adapter.rng.fork() if share else nullcontext():
            down = F.linear(F.dropout(x, share), self.lora_A)
        if self.sequence_parallel:
            down = scatter_sequence(down, 0, self.group)
        else:
            down = reduce_from_tensor_parallel(down, self.group)
        return super().forward(x) + self.adapter.scale * F.linear(down, self.lora_B)


def column_parallel(*sizes: int, adapter: Adapter | None, **options: Any) -> ColumnParallelLinear:
    """Build a ColumnParallelLinear, with a LoRA adapter if `adapter` is given."""
    return _build(ColumnParallelLinear, AdaptedColumnParallelLinear, sizes, adapter, options)


def row_parallel(*sizes: int, adapter: Adapter | None, **options: Any) -> RowParallelLinear:
    """Build a RowParallelLinear, with a LoRA adapter if `adapter` is given."""
    return _build(RowParallelLinear, AdaptedRowParallelLinear, sizes, adapter, options)


def _build(
    plain: Callable[..., Any],
    adapted: Callable[..., Any],
    sizes: tuple[int, ...],
    adapter: Adapter | None,
    options: dict[str, Any],
) -> Any:
    if adapter is None:
        return plain(*sizes, **options)
    return adapted(*sizes, adapter=adapter, **options)
