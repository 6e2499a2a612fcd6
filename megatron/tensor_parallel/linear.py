"""Linear layers whose weight is divided over the tensor-parallel ranks."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.tensor_parallel.collectives import (
    all_gather,
    copy_to_tensor_parallel,
    reduce_from_tensor_parallel,
    reduce_scatter,
    scatter_sequence,
)
from megatron.tensor_parallel.sharding import exact_quotient, layout_of, mark_sharded


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the output features divided over the tensor-parallel ranks.

    Args:
        in_features: width of x, the same on every rank.
        out_features: width of y over all ranks; a multiple of the group's size.
        group: the tensor-parallel ranks.
        has_bias: whether there is a bias at all.
        adds_bias: whether y has the bias already; if not it is left to the caller.
        sequence_parallel: whether the ranks divide the sequence outside of the layer.

    Shapes: x [..., in_features] -> y [..., out_features / t], t the group's size. When the ranks
        divide the sequence: x [s/t, ...] -> y [s, ...].
    Communication: none forward; one all-reduce of x's gradient backward. When the ranks divide
        the sequence: an all-gather of x forward, backward another and a reduce-scatter.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: dist.ProcessGroup,
        has_bias: bool = True,
        adds_bias: bool = True,
        sequence_parallel: bool = False,
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.group, self.sequence_parallel = group, sequence_parallel
        self.adds_bias = adds_bias
        local_features = exact_quotient(out_features, group.size(), "out_features")
        self.weight = mark_sharded(nn.Parameter(torch.empty(local_features, in_features)), 0, group)
        bias = (
            mark_sharded(nn.Parameter(torch.zeros(local_features)), 0, group) if has_bias else None
        )
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.adds_bias else None
        if self.sequence_parallel:
            return gathering_linear(x, self.weight, bias, dim=0, group=self.group)
        return F.linear(copy_to_tensor_parallel(x, self.group), self.weight, bias)

    def extra_repr(self) -> str:
        """Return the sizes over all ranks, and the parallel layout."""
        # Not from the weight, which is empty between steps with ZeRO-3.
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, {layout_of(self)}"


class RowParallelLinear(nn.Module):
    """y = x W^T with the input features divided over the tensor-parallel ranks.

    The bias is replicated and left to the caller, which adds it together with dropout and the
    residual.

    Args:
        in_features: width of x over all ranks; a multiple of the group's size.
        out_features: width of y, the same on every rank.
        group: the tensor-parallel ranks.
        has_bias: whether there is a bias.
        sequence_parallel: whether the ranks divide the sequence outside of the layer.

    Shapes: x [..., in_features / t] -> y [..., out_features], t the group's size. When the ranks
        divide the sequence: x [s, ...] -> y [s/t, ...].
    Communication: one all-reduce of y forward; none backward. When the ranks divide the sequence:
        a reduce-scatter forward, an all-gather backward.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: dist.ProcessGroup,
        has_bias: bool = True,
        sequence_parallel: bool = False,
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.group, self.sequence_parallel = group, sequence_parallel
        local_features = exact_quotient(in_features, group.size(), "in_features")
        self.weight = mark_sharded(
            nn.Parameter(torch.empty(out_features, local_features)), 1, group
        )
        bias = nn.Parameter(torch.zeros(out_features)) if has_bias else None
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        if self.sequence_parallel:
            return scatter_sequence(y, 0, self.group)
        return reduce_from_tensor_parallel(y, self.group)

    def extra_repr(self) -> str:
        """Return the sizes over all ranks, and the parallel layout."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, {layout_of(self)}"


class GatheringLinear(torch.autograd.Function):
    """All-gather x, then x W^T + b; saves only this rank's x and gathers again in backward.

    Communication: an all-gather of x forward; backward another and a reduce-scatter.
    Source: arXiv:2205.05198, section 4.2.2.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dim: int,
        group: dist.ProcessGroup,
    ) -> Tensor:
        """Return the product with all ranks' `x`, concatenated along `dim`."""
        ctx.save_for_backward(x, weight)
        ctx.dim, ctx.group = dim, group
        return F.linear(all_gather(x, dim, group), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of this rank's x, of the weight and of the bias."""
        x, weight = ctx.saved_tensors
        (grad,) = grads
        full = all_gather(x, ctx.dim, ctx.group)
        rows = grad.flatten(0, -2)
        return (
            reduce_scatter(grad @ weight, ctx.dim, ctx.group),
            rows.mT @ full.flatten(0, -2),
            rows.sum(0) if ctx.needs_input_grad[2] else None,
            None,
            None,
        )


def gathering_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, dim: int, group: dist.ProcessGroup
) -> Tensor:
    """All-gather `x` along `dim` and return x W^T + b."""
    return GatheringLinear.apply(x, weight, bias, dim, group)
