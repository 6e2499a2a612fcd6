"""Linear layers with a low-rank adapter beside the weight: y = x W^T + scale (x A^T) B^T.

A is [rank, in] and B [out, rank]; B begins as 0, so that the adapter begins as nothing. They are
parameters of the layer itself, so the weight keeps its name, and a checkpoint without adapters
opens. Source: arXiv:2106.09685, section 4.1.
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
    """What an adapter is made of.

    Args:
        rank: features between the two matrices.
        scale: what their product is multiplied by.
        dropout: share of the features of x that the adapter does not see.
        rng: the stream that differs between tensor-parallel ranks.
    """

    rank: int
    scale: float
    dropout: float
    rng: RngTracker


def is_adapter(name: str) -> bool:
    """Whether this is the name of a parameter of an adapter."""
    return name.endswith((f".{DOWN}", f".{UP}"))


class AdaptedColumnParallelLinear(ColumnParallelLinear):
    """A ColumnParallelLinear with an adapter: A is whole on every rank, B divided like the weight.

    Communication: besides that of the layer, one all-reduce of [s, b, rank] backward. When the
    ranks divide the sequence: an all-gather of it forward, backward another and a reduce-scatter.
    Randomness: dropout draws from the ordinary stream: ranks that see the same tokens drop the
    same features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: dist.ProcessGroup,
        adapter: Adapter,
        **wishes: Any,
    ):
        super().__init__(in_features, out_features, group=group, **wishes)
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
    """A RowParallelLinear with an adapter: A is divided like the weight, B whole on every rank.

    Communication: besides that of the layer, one all-reduce of [s, b, rank] forward. When the
    ranks divide the sequence: a reduce-scatter of it forward, an all-gather backward.
    Randomness: dropout draws from the stream that differs between ranks, each of which has other
    features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: dist.ProcessGroup,
        adapter: Adapter,
        **wishes: Any,
    ):
        super().__init__(in_features, out_features, group=group, **wishes)
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


def column_parallel(*sizes: int, adapter: Adapter | None, **wishes: Any) -> ColumnParallelLinear:
    """Return a ColumnParallelLinear, with `adapter` beside its weight if there is one."""
    return _built(ColumnParallelLinear, AdaptedColumnParallelLinear, sizes, adapter, wishes)


def row_parallel(*sizes: int, adapter: Adapter | None, **wishes: Any) -> RowParallelLinear:
    """Return a RowParallelLinear, with `adapter` beside its weight if there is one."""
    return _built(RowParallelLinear, AdaptedRowParallelLinear, sizes, adapter, wishes)


def _built(
    plain: Callable[..., Any],
    adapted: Callable[..., Any],
    sizes: tuple[int, ...],
    adapter: Adapter | None,
    wishes: dict[str, Any],
) -> Any:
    if adapter is None:
        return plain(*sizes, **wishes)
    return adapted(*sizes, adapter=adapter, **wishes)
