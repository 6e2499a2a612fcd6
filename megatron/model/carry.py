"""What travels between layers: the activations and, if it is not what is before it, what each
token sees.

An s x s mask would be larger than the activations. But what a token sees is one stretch of
positions in every objective here: the text before it, its own document up to it, or a prefix as
a whole. So two numbers for each token are enough, and their shape never changes.
"""

import torch
from torch import Tensor

Carried = Tensor | tuple[Tensor, Tensor]
"""x, or (x, spans_bs2): [b, s, 2] int64, the first position that a token sees and the one after
the last. Every token sees itself."""


def unpack(carried: Carried) -> tuple[Tensor, Tensor | None]:
    """Return the activations and, if they travel too, the spans."""
    return carried if isinstance(carried, tuple) else (carried, None)


def pack(x: Tensor, spans_bs2: Tensor | None) -> Carried:
    """Return what the next layer gets."""
    return x if spans_bs2 is None else (x, spans_bs2)


def visible(spans_bs2: Tensor) -> Tensor:
    """Return which tokens a token sees.

    Shapes: spans_bs2 [b, s, 2] -> [b, 1, s, s] bool, tokens that see in rows.
    """
    keys_s = torch.arange(spans_bs2.size(1), device=spans_bs2.device)
    first_bs1, stop_bs1 = spans_bs2.split(1, dim=-1)
    return ((first_bs1 <= keys_s) & (keys_s < stop_bs1))[:, None]
