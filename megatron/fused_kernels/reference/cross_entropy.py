"""Cross-entropy over one rank's slice of the vocabulary, without the collectives in between."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """One implementation of the local parts of the cross-entropy.

    n counts tokens; `target` is an index into the slice, -1 for a token of another rank's slice.
    The first `real` columns take part; the others are padding of the vocabulary, whose gradient is
    zero. `gradient` and `full` may overwrite the logits.

    Args:
        largest: (logits_nv, real) -> [n] float32, the greatest logit of every token.
        sums: (logits_nv, largest_n, target_n, real) -> ([n], [n]) float32: the sum of
            exp(logit - largest), and the target's logit - largest, 0 for a foreign target.
        gradient: (logits_nv, log_total_n, target_n, grad_n, real) -> [n, v] in the dtype of the
            logits: (exp(logit - log_total) - one at the target) * grad.
        full: (logits_nv, target_n, real) -> [n] float32, the loss if one rank has the full
            vocabulary, differentiable by autograd.
    """

    largest: Callable[[Tensor, int], Tensor]
    sums: Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
    full: Callable[[Tensor, Tensor, int], Tensor]


def largest(logits_nv: Tensor, real: int) -> Tensor:
    """Return the greatest logit of every token, -inf if all columns are padding."""
    if real == 0:
        return logits_nv.new_full((len(logits_nv),), -torch.inf, dtype=torch.float32)
    return logits_nv[:, :real].amax(-1).float()


def sums(
    logits_nv: Tensor, largest_n: Tensor, target_n: Tensor, real: int
) -> tuple[Tensor, Tensor]:
    """Return the sum of exp(logit - largest), and the target's logit - largest or 0."""
    total_n = (logits_nv[:, :real] - largest_n[:, None]).exp_().sum(-1)
    mine_n = target_n >= 0
    # Every token must gather something, so a foreign target reads column 0 and is zeroed.
    own_n = logits_nv.gather(-1, target_n.where(mine_n, 0)[:, None]).squeeze(-1)
    # Not a product: column 0 may be padding, and infinite.
    return total_n, (own_n - largest_n).where(mine_n, 0.0)


def gradient(
    logits_nv: Tensor, log_total_n: Tensor, target_n: Tensor, grad_n: Tensor, real: int
) -> Tensor:
    """Return (softmax - one at the target) * grad."""
    softmax_nv = (logits_nv - log_total_n[:, None]).exp_()
    softmax_nv[:, real:] = 0
    mine_n = target_n >= 0
    column_n1 = target_n.where(mine_n, 0)[:, None]
    softmax_nv.scatter_add_(-1, column_n1, -mine_n[:, None].to(softmax_nv.dtype))
    return softmax_nv.mul_(grad_n[:, None]).to(logits_nv.dtype)


def full(logits_nv: Tensor, target_n: Tensor, real: int) -> Tensor:
    """Return the loss of every token over the full vocabulary, by torch's own kernel.

    Padding becomes -inf in place, without autograd: its softmax is zero, and so is its gradient.
    """
    if real < logits_nv.size(1):
        with torch.no_grad():
            logits_nv[:, real:] = -torch.inf
    # float32: the sum over a large vocabulary loses its tail in 16 bits.
    wide_nv = logits_nv if logits_nv.element_size() >= 4 else logits_nv.float()
    return F.cross_entropy(wide_nv, target_n, reduction="none")


REFERENCE = CrossEntropy(largest=largest, sums=sums, gradient=gradient, full=full)
"""Implementation in torch, for any device."""

COMPILED = replace(REFERENCE)
"""The same for torch.compile, which fuses the cast to 32 bits: it takes 16-bit logits."""
