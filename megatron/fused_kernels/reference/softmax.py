"""Softmax over attention scores: scaling, masking and normalising in one operation."""

import torch
from torch import Tensor


def scaled_causal_softmax(scores: Tensor, scale: float, *, in_fp32: bool = False) -> Tensor:
    """Return softmax(scale * scores) over the keys that do not come after the query.

    The last query sees the last key, so fewer queries than keys are the end of a sequence.

    Args:
        in_fp32: scale and normalise in 32 bits when the scores have fewer.

    Shapes: scores [b, a, sq, sk] -> the same, in the dtype of `scores`.
    """
    sq, sk = scores.shape[-2:]
    mask = torch.ones(sq, sk, dtype=torch.bool, device=scores.device).tril(sk - sq)
    return scaled_masked_softmax(scores, mask, scale, in_fp32=in_fp32)


def scaled_masked_softmax(
    scores: Tensor, mask: Tensor | None, scale: float, *, in_fp32: bool = False
) -> Tensor:
    """Return softmax(scale * scores) over the keys where `mask` is true.

    Where it is false the result is 0: a query that sees no key gets a row of zeros.

    Args:
        mask: True where a query sees a key; None when every query sees every key.
        in_fp32: scale and normalise in 32 bits when the scores have fewer.

    Shapes: scores [b, a, sq, sk], mask broadcastable to it -> [b, a, sq, sk], dtype of `scores`.
    """
    wide = scores.float() if in_fp32 and scores.element_size() < 4 else scores
    wide = wide * scale
    if mask is None:
        return wide.softmax(-1).to(scores.dtype)
    hidden = ~mask
    # The smallest number, not -inf: a row without any key would become NaN, gradient included.
    wide = wide.masked_fill(hidden, torch.finfo(wide.dtype).min)
    return wide.softmax(-1).masked_fill(hidden, 0.0).to(scores.dtype)
