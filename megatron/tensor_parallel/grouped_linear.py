"""Grouped products: the rows of a tensor multiplied by a matrix for each group of rows (experts)."""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.tensor_parallel.sharding import (
    ExpertShare,
    exact_quotient,
    mark_expert,
    mark_initial,
    mark_partial_gradient,
    mark_residual,
    mark_sharded,
    mark_transposed,
)

_ALIGNMENT = 8
"""Elements of 16 bits to which the rows of matrices are aligned for the grouped kernel."""


@dataclass(frozen=True)
class Segments:
    """Consecutive groups of rows.

    Args:
        counts: rows of each group, on the device.
        rows: of all groups, and of padding after the last one, which only the kernel takes.
        known_sizes: the counts, if they are already on the host.
    """

    counts: Tensor
    rows: int
    known_sizes: list[int] | None = None

    @cached_property
    def ends(self) -> Tensor:
        """Index after the last row of each group; the last group takes the padding."""
        ends = self.counts.cumsum(0).to(torch.int32)
        ends[-1:].fill_(self.rows)
        return ends

    @cached_property
    def numbers(self) -> Tensor:
        """The group of each row."""
        rows = torch.arange(self.rows, dtype=torch.int32, device=self.counts.device)
        return torch.searchsorted(self.ends, rows, right=True)

    @cached_property
    def sizes(self) -> list[int]:
        """Rows of each group, on the host, which waits for the device if they are not known."""
        sizes: list[int] = self.known_sizes or self.counts.tolist()
        return sizes

    def without_padding(self) -> "Segments":
        """Return the groups alone; the host waits for the device."""
        return Segments(self.counts, sum(self.sizes), self.sizes)


def grouped_product(
    x: Tensor, weight_gkn: Tensor, bias_gn: Tensor | None, segments: Segments
) -> Tensor:
    """Multiply each group's rows of `x` by its matrix: one kernel on GPUs, a loop elsewhere.

    The loop waits for the device, the kernel does not.

    Shapes: x [rows, k], weight [groups, k, n], bias [groups, n] -> [rows, n].
    """
    if has_kernel(x, weight_gkn):
        y = F.grouped_mm(x, weight_gkn, offs=segments.ends)
        return y if bias_gn is None else y + bias_gn.index_select(0, segments.numbers)
    groups, matrices = x.split(segments.sizes), weight_gkn.unbind(0)
    if bias_gn is None:
        return torch.cat([*map(torch.mm, groups, matrices)])
    return torch.cat([*map(torch.addmm, bias_gn.unbind(0), groups, matrices)])


def has_kernel(x: Tensor, weight_gkn: Tensor) -> bool:
    """Whether one kernel computes the product: on GPUs in bf16."""
    aligned = all(size % _ALIGNMENT == 0 for size in weight_gkn.shape[1:])
    return x.is_cuda and x.dtype == torch.bfloat16 and aligned


class GroupedLinear(nn.Module):
    """A linear layer of each expert, its inner features divided over the ranks that share it.

    The weight is [experts, inner features, outer features] for layers that widen and that narrow,
    so ranks have rows of every matrix, and experts are rows of the full tensor.

    Args:
        outer: features outside of the experts, the same on every rank.
        inner: features inside, over all ranks; a multiple of the group's size.
        group: the ranks that share each expert.
        share: the experts of this rank among all.
        num_experts: of this rank.
        narrows: whether x has the inner features. Its result is then this rank's term of a sum.
        has_bias: whether there is a bias. A bias after the inner features is replicated, and each
            rank adds its share of it.

    Shapes: x [rows, outer] -> y [rows, inner / t], t the group's size, or the reverse.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        outer: int,
        inner: int,
        *,
        group: dist.ProcessGroup,
        num_experts: int,
        share: ExpertShare | None,
        narrows: bool,
        has_bias: bool,
    ):
        super().__init__()
        self.narrows, self.group = narrows, group
        local = exact_quotient(inner, group.size(), "inner features")
        weight = nn.Parameter(torch.empty(num_experts, local, outer))
        self.weight = mark_sharded(weight, 1, group)
        if narrows:
            mark_residual(mark_transposed(weight))
        bias = nn.Parameter(torch.zeros(num_experts, outer if narrows else local))
        mark_initial(bias, "constructed")
        if not has_bias:
            self.register_parameter("bias", None)
        elif narrows:
            self.bias = mark_partial_gradient(bias, group)
        else:
            self.bias = mark_sharded(bias, 1, group)
        if share:
            for parameter in self.parameters():
                mark_expert(parameter, share)

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        """Return the products of the rows of each expert."""
        weight = self.weight if self.narrows else self.weight.mT
        bias: Tensor | None = self.bias
        if bias is not None and self.narrows:
            bias = bias / self.group.size()
        return grouped_product(x, weight, bias, segments)

    def extra_repr(self) -> str:
        """Return whether there is a bias, and the parallel layout."""
        return f"bias={self.bias is not None}, tensor_parallel={self.group.size()}"
