"""Heads of a fused projection, and rotary position embedding of queries and keys."""

from typing import Any

import torch
from torch import Tensor

Tables = tuple[Tensor, Tensor]
"""Cosines and sines of rotary angles, in 32 bits."""


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x` with its first features turned by the angles of their positions.

    Feature i is rotated with feature i + r/2, for the first r features; the rest are unchanged.

    Args:
        cos: cosine of every angle, in 32 bits so that late positions keep theirs.
        sin: its sine.

    Shapes: x [b, a, s, d]; cos and sin [s, r/2], or [b, 1, s, r/2] when samples have positions of
    their own -> [b, a, s, d], in the dtype of `x`; computed in the wider one of x and cos.
    Source: arXiv:2104.09864, section 3.4.2, with halves in place of neighbours.
    """
    half = cos.size(-1)
    first, second, rest = x.split([half, half, x.size(-1) - 2 * half], dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat([*(part.to(x.dtype) for part in turned), rest], dim=-1)


def split_heads(
    fused: Tensor, bias: Tensor | None, tables: Tables | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of a fused projection.

    Args:
        fused: heads of each group: its queries, a key, a value.
        bias: of the projection, which `fused` has already: here it gets its gradient, the sum of that
            of `fused`. None: the projection itself computes it.
        tables: angles by which queries and keys are turned; None: they are not.

    Shapes: fused [s, b, groups, queries + 2, d], bias [groups * (queries + 2) * d], tables cos and
        sin of `rotary` -> query [b, a, s, d], key and value [b, groups, s, d].
    """
    if bias is not None:
        fused = _WithBias.apply(fused, bias)
    parts = fused.split([fused.size(3) - 2, 1, 1], dim=3)
    query, key, value = (x.flatten(2, 3).permute(1, 2, 0, 3) for x in parts)
    if tables is None:
        return query, key, value
    return rotary(query, *tables), rotary(key, *tables), value


class _WithBias(torch.autograd.Function):
    """Return `fused`, a sum with `bias`, whose gradient is that of `fused` summed over its rows."""

    @staticmethod
    def forward(ctx: Any, fused: Tensor, bias: Tensor) -> Tensor:
        ctx.shape = bias.shape
        return fused.view_as(fused)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        (grad,) = grads
        return grad, grad.sum((0, 1)).view(ctx.shape) if ctx.needs_input_grad[1] else None
