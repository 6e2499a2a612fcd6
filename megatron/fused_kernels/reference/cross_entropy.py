"""What one rank computes of a cross-entropy over its own slice of the vocabulary.

The collectives between these parts are the caller's.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.fused_kernels.reference.limits import unsupported_dtype


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """The parts of one implementation.

    n counts tokens; `target` is an index into the slice, -1 for a token of another rank's slice.
    Columns that take no part, such as padding of the vocabulary, are -inf.

    Args:
        largest: logits_nv -> [n] float32, the greatest logit of every token.
        sums: (logits_nv, largest_n, target_n) -> ([n], [n]) float32: the sum of
            exp(logit - largest), and the target's logit - largest, 0 for a foreign target.
        gradient: (logits_nv, log_total_n, target_n, grad_n) -> [n, v] in the dtype of the logits:
            (exp(logit - log_total) - one at the target) * grad. It may overwrite the logits.
        whole: (logits_nv, target_n) -> [n] float32, the loss when one rank has all of the
            vocabulary, differentiable by autograd.
    """

    largest: Callable[[Tensor], Tensor]
    sums: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    whole: Callable[[Tensor, Tensor], Tensor]


def largest(logits_nv: Tensor) -> Tensor:
    """Return the greatest logit of every token."""
    return logits_nv.amax(-1).float()


def sums(logits_nv: Tensor, largest_n: Tensor, target_n: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of exp(logit - largest), and the target's logit - largest or 0."""
    total_n = (logits_nv - largest_n[:, None]).exp_().sum(-1)
    mine_n = target_n >= 0
    # Every token must gather something, so a foreign target reads column 0 and is zeroed.
    own_n = logits_nv.gather(-1, target_n.where(mine_n, 0)[:, None]).squeeze(-1)
    # Not a product: column 0 is -inf where the whole slice is padding.
    return total_n, (own_n - largest_n).where(mine_n, 0.0)


def gradient(logits_nv: Tensor, log_total_n: Tensor, target_n: Tensor, grad_n: Tensor) -> Tensor:
    """Return (softmax - one at the target) * grad."""
    softmax_nv = (logits_nv - log_total_n[:, None]).exp_()
    mine_n = target_n >= 0
    column_n1 = target_n.where(mine_n, 0)[:, None]
    softmax_nv.scatter_add_(-1, column_n1, -mine_n[:, None].to(softmax_nv.dtype))
    return softmax_nv.mul_(grad_n[:, None]).to(logits_nv.dtype)


def whole(logits_nv: Tensor, target_n: Tensor) -> Tensor:
    """Return the loss of every token over the whole vocabulary, by torch's own kernel."""
    # float32: the sum over a large vocabulary loses its tail in 16 bits.
    wide_nv = logits_nv if logits_nv.element_size() >= 4 else logits_nv.float()
    return F.cross_entropy(wide_nv, target_n, reduction="none")


def unsupported(dtype: torch.dtype) -> str | None:
    """Return why the Triton kernels cannot take tensors of `dtype`; None when they can."""
    return unsupported_dtype(dtype)


REFERENCE = CrossEntropy(largest=largest, sums=sums, gradient=gradient, whole=whole)
"""The parts in torch, for any device."""
