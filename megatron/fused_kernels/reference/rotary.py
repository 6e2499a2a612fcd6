"""Rotary position embedding of queries and keys."""

import torch
from torch import Tensor


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


def split_rotary(fused: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of a fused projection, queries and keys turned by `rotary`.

    Args:
        fused: heads of each group: its queries, a key, a value.

    Shapes: fused [s, b, groups, queries + 2, d], cos and sin as of `rotary` -> query [b, a, s, d],
        key and value [b, groups, s, d].
    """
    parts = fused.split([fused.size(3) - 2, 1, 1], dim=3)
    query, key, value = (x.flatten(2, 3).permute(1, 2, 0, 3) for x in parts)
    return rotary(query, cos, sin), rotary(key, cos, sin), value
