"""Cross-entropy when each rank holds a slice of the vocabulary."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


class VocabParallelCrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target] over logits divided along the vocabulary.

    Shapes: logits [..., V/t] float32, target [...] int64 -> loss [...] float32.
    Communication: three all-reduces of the shape of `target` forward, none backward.
    Source: arXiv:1909.08053, section 3.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the loss of every position."""
        largest = logits.amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        logits = logits - largest[..., None]

        local = target - group.rank() * logits.size(-1)
        mine = (local >= 0) & (local < logits.size(-1))
        # Every rank must gather something, so a foreign target reads column 0 and is zeroed.
        local = local.where(mine, 0)
        target_logit = logits.gather(-1, local[..., None]).squeeze(-1) * mine
        dist.all_reduce(target_logit, group=group)

        exp = logits.exp_()
        total = exp.sum(-1)
        dist.all_reduce(total, group=group)
        ctx.save_for_backward(exp.div_(total[..., None]), local, mine)
        return total.log() - target_logit

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return (softmax - one_hot(target)) * grad."""
        softmax, local, mine = ctx.saved_tensors
        grad = softmax.clone()
        grad.scatter_add_(-1, local[..., None], -mine[..., None].to(grad.dtype))
        return grad.mul_(grads[0][..., None]), None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, target: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """Return the loss of every position; torch's own kernel when the group is one rank.

    Shapes: logits [..., V/t] (any float), target [...] int64 -> loss [...] float32.
    """
    # float32: the sum over a large vocabulary loses its tail in 16 bits.
    logits = logits.float()
    if group.size() > 1:
        return VocabParallelCrossEntropy.apply(logits, target, group)
    flat = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none")
    return flat.view_as(target)
