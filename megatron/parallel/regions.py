"""Collectives with a backward: the two ends of a tensor-parallel region."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class CopyToTensorParallel(torch.autograd.Function):
    """Identity forward, all-reduce backward: `f` of Megatron-LM.

    Communication: none forward; one all-reduce of x's gradient backward.
    Source: arXiv:1909.08053, figure 3.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return `x` itself."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the sum of all ranks' gradients."""
        # The gradient may be a view that autograd uses elsewhere; the reduction is in place.
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceFromTensorParallel(torch.autograd.Function):
    """All-reduce forward, identity backward: `g` of Megatron-LM.

    Communication: one all-reduce of x forward; none backward.
    Source: arXiv:1909.08053, figure 3.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the sum of all ranks' `x`."""
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient itself."""
        return grads[0], None


def copy_to_tensor_parallel(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Enter a tensor-parallel region; nothing to do when the group is one rank."""
    return CopyToTensorParallel.apply(x, group) if group.size() > 1 else x


def reduce_from_tensor_parallel(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Leave a tensor-parallel region; nothing to do when the group is one rank."""
    return ReduceFromTensorParallel.apply(x, group) if group.size() > 1 else x
