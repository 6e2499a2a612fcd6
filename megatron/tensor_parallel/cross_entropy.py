"""Vocabulary-parallel cross-entropy: each tensor-parallel rank has a slice of the logits."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class LocalCrossEntropy(Protocol):
    """Local computations of the cross-entropy on a slice of v vocabulary entries for n tokens.

    A target is an index into the slice, -1 if it lies in another rank's slice. The first `real`
    columns take part; the gradient of the others is zero.
    """

    @property
    def largest(self) -> Callable[[Tensor, int], Tensor]:
        """(logits_nv, real) -> the largest logit of every token, [n] float32."""

    @property
    def sums(self) -> Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]:
        """(logits_nv, largest_n, target_n, real) -> two times [n] float32.

        The sums of exp(logit - largest), and the targets' logit - largest, 0 for a foreign one.
        """

    @property
    def gradient(self) -> Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]:
        """(logits_nv, log_total_n, target_n, grad_n, real) -> [n, v]; may overwrite the logits."""

    @property
    def full(self) -> Callable[[Tensor, Tensor, int], Tensor]:
        """(logits_nv, target_n, real) -> the loss [n] float32 if the slice is the full vocabulary.

        It may overwrite the logits.
        """


class VocabParallelCrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target] over logits divided along the vocabulary.

    Shapes: logits_nv [n, V/t] (any float), target_n [n] int64 -> loss [n] float32.
    Communication: one all-reduce of [n] and one of [2, n] forward, none backward.
    Source: arXiv:1909.08053, section 3.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_nv: Tensor,
        target_n: Tensor,
        group: dist.ProcessGroup,
        local: LocalCrossEntropy,
        real: int,
    ) -> Tensor:
        """Return the loss of every token."""
        largest_n = local.largest(logits_nv, real)
        dist.all_reduce(largest_n, op=dist.ReduceOp.MAX, group=group)

        own_n = target_n - group.rank() * logits_nv.size(-1)
        own_n = own_n.where((own_n >= 0) & (own_n < logits_nv.size(-1)), -1)
        sums_2n = torch.stack(local.sums(logits_nv, largest_n, own_n, real))
        dist.all_reduce(sums_2n, group=group)
        total_n, target_logit_n = sums_2n
        log_total_n = total_n.log()
        ctx.local, ctx.real = local, real
        ctx.save_for_backward(logits_nv, log_total_n + largest_n, own_n)
        return log_total_n - target_logit_n

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Return (softmax - one_hot(target)) * grad."""
        grad_nv = ctx.local.gradient(*ctx.saved_tensors, grads[0], ctx.real)
        return grad_nv, None, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    group: dist.ProcessGroup,
    *,
    local: LocalCrossEntropy,
    vocab_size: int | None = None,
) -> Tensor:
    """Return the loss of every position; the logits may be overwritten.

    Args:
        local: kernels for this rank's slice.
        vocab_size: columns over all ranks that take part in the softmax; further ones are padding
            of the vocabulary, with zero gradient. None: all take part.

    Shapes: logits [..., V/t] (any float), target [...] int64 -> loss [...] float32.
    """
    logits_nv, target_n = logits.flatten(0, -2), target.flatten()
    real = columns = logits.size(-1)
    if vocab_size is not None:
        real = min(max(vocab_size - group.rank() * columns, 0), columns)
    if group.size() > 1:
        loss_n = VocabParallelCrossEntropy.apply(logits_nv, target_n, group, local, real)
    else:
        loss_n = local.full(logits_nv, target_n, real)
    return loss_n.view_as(target)
