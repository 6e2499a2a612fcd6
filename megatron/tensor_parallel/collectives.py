"""Differentiable collectives: all-reduce, reduce-scatter, all-gather, all-to-all of tensor parallelism."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Wait = Callable[[], Tensor]
"""Waits for a collective that was started, and returns its result."""


class CopyToTensorParallel(torch.autograd.Function):
    """Identity forward, all-reduce backward: `f` of Megatron-LM.

    Communication: none forward; one all-reduce of x's gradient backward.
    Source: arXiv:1909.08053, figure 3.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return `x` unchanged."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the sum of all ranks' gradients."""
        # Cloned: the all-reduce is in place, and the gradient may be a view that autograd uses.
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
        """Return the gradient unchanged."""
        return grads[0], None


def copy_to_tensor_parallel(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Enter a tensor-parallel region; nothing to do when the group is one rank."""
    return CopyToTensorParallel.apply(x, group) if group.size() > 1 else x


def reduce_from_tensor_parallel(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Leave a tensor-parallel region; nothing to do when the group is one rank. May overwrite `x`."""
    if group.size() == 1:
        return x
    if torch.is_grad_enabled():
        return ReduceFromTensorParallel.apply(x, group)
    # Not the function's own forward: where no gradient is kept, torch.compile refuses `mark_dirty`.
    x = x.contiguous()
    dist.all_reduce(x, group=group)
    return x


class ScatterSequence(torch.autograd.Function):
    """Reduce-scatter forward, all-gather backward: leave a tensor-parallel region with a sequence shard.

    Communication: one reduce-scatter of x forward, one all-gather of the gradient backward.
    Source: arXiv:2205.05198, section 4.2 (`g` conjugate).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        """Return this rank's slice along `dim` of the sum of all ranks' `x`."""
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return all ranks' gradients, concatenated along `dim`."""
        return all_gather(grads[0], ctx.dim, ctx.group), None, None


class GatherSequence(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward: enter a tensor-parallel region with the full sequence.

    Communication: one all-gather of x forward, one reduce-scatter of the gradient backward.
    Source: arXiv:2205.05198, section 4.2 (`g`).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        """Return all ranks' `x`, concatenated along `dim`."""
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return this rank's slice along `dim` of the sum of all ranks' gradients."""
        return reduce_scatter(grads[0], ctx.dim, ctx.group), None, None


class AllToAll(torch.autograd.Function):
    """All-to-all: change the sharded dimension; rank i gets slice i of `scatter` from every rank.

    Communication: one all-to-all of x forward, one of its gradient backward.
    Source: arXiv:2309.14509, section 3.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scatter: int, gather: int, group: dist.ProcessGroup) -> Tensor:
        """Return `x` full along `gather` and sharded along `scatter`."""
        ctx.scatter, ctx.gather, ctx.group = scatter, gather, group
        return _all_to_all(x, scatter, gather, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient, sharded like x."""
        return _all_to_all(grads[0], ctx.gather, ctx.scatter, ctx.group), None, None, None


class ExchangeRows(torch.autograd.Function):
    """All-to-all of rows with uneven splits: tokens to the ranks of their experts, or back.

    Communication: one all-to-all of x forward, one of its gradient backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        """Return the rows that all ranks send to this one, in the order of the ranks."""
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradients of the rows that this rank has sent."""
        return _exchange(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate all ranks' `x` along `dim`, without autograd."""
    return start_all_gather(x, dim, group)()


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's slice along `dim` of the sum of all ranks' `x`, without autograd."""
    return start_reduce_scatter(x, dim, group)()


def start_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Wait:
    """Start to sum a contiguous `x` in place over all ranks, without autograd."""
    return _start(x, lambda **how: dist.all_reduce(x, group=group, **how))


def start_all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Wait:
    """Start `all_gather`."""
    shard = x.movedim(dim, 0).contiguous()
    full = shard.new_empty(group.size() * shard.size(0), *shard.shape[1:])
    wait = _start(full, lambda **how: dist.all_gather_single(full, shard, group=group, **how))
    return lambda: _moved_from_front(wait(), dim)


def start_reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Wait:
    """Start `reduce_scatter`."""
    full = x.movedim(dim, 0).contiguous()
    shard = full.new_empty(full.size(0) // group.size(), *full.shape[1:])
    wait = _start(shard, lambda **how: dist.reduce_scatter_single(shard, full, group=group, **how))
    return lambda: _moved_from_front(wait(), dim)


def start_ring(sent: Sequence[Tensor], group: dist.ProcessGroup) -> Callable[[], list[Tensor]]:
    """Start to send contiguous tensors to the next rank and to receive those of the one before.

    The first rank is next to the last. The function that is returned waits, and returns what was
    received. Every rank sends as many tensors of the same shapes; without autograd.
    """
    if not sent:
        return lambda: []
    ranks, rank = group.size(), group.rank()
    received = [torch.empty_like(x) for x in sent]
    operations = [
        dist.P2POp(call, x, group=group, group_peer=(rank + step) % ranks, tag=tag)
        for tag, pair in enumerate(zip(sent, received, strict=True))
        for call, x, step in zip((dist.isend, dist.irecv), pair, (1, -1), strict=True)
    ]
    works = dist.batch_isend_irecv(operations)

    def wait() -> list[Tensor]:
        for work in works:
            work.wait()
        return received

    return wait


def _start(result: Tensor, call: Callable[..., Any]) -> Wait:
    """Call a collective with `async_op`.

    In code that torch.compile traces the compiler places the waiting itself.
    """
    if torch.compiler.is_compiling():
        call()
        return lambda: result
    work = call(async_op=True)

    def wait() -> Tensor:
        work.wait()
        return result

    return wait


def _moved_from_front(x: Tensor, dim: int) -> Tensor:
    # A fresh tensor, not a view: callers may modify it in place.
    return x.movedim(0, dim).contiguous() if dim else x


def _all_to_all(x: Tensor, scatter: int, gather: int, group: dist.ProcessGroup) -> Tensor:
    parts = x.unflatten(scatter, (group.size(), -1)).movedim(scatter, 0).contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received.movedim(0, gather).flatten(gather, gather + 1)


def _exchange(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    result = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(result, x.contiguous(), received, sent, group=group)
    return result


def scatter_sequence(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Leave a tensor-parallel region with this rank's slice of the sequence dimension `dim`."""
    return ScatterSequence.apply(x, dim, group)


def gather_sequence(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Enter a tensor-parallel region with all ranks' slices of the sequence dimension `dim`."""
    return GatherSequence.apply(x, dim, group)


def all_to_all(x: Tensor, *, scatter: int, gather: int, group: dist.ProcessGroup) -> Tensor:
    """Return `x` full along dimension `gather` and sharded along `scatter` instead."""
    return AllToAll.apply(x, scatter, gather, group)


def exchange_rows(
    x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Send `sent[r]` rows of `x` to each rank r, and return `received[r]` rows of each."""
    return ExchangeRows.apply(x, sent, received, group)
