"""What travels between layers: the activations, and which document each token belongs to.

The second part is there only when documents are kept apart. An s x s mask would be larger than
the activations, so layers get what it is made from.
"""

import torch
from torch import Tensor

Carried = Tensor | tuple[Tensor, Tensor]
"""x, or (x, documents_bs): [b, s] int64, equal for tokens of one document."""


def unpack(carried: Carried) -> tuple[Tensor, Tensor | None]:
    """Return the activations and, if they travel too, the documents."""
    return carried if isinstance(carried, tuple) else (carried, None)


def pack(x: Tensor, documents_bs: Tensor | None) -> Carried:
    """Return what the next layer gets."""
    return x if documents_bs is None else (x, documents_bs)


def visible(documents_bs: Tensor) -> Tensor:
    """Return which tokens a token sees: those before it in its own document, and itself.

    Shapes: documents_bs [b, s] -> [b, 1, s, s] bool.
    """
    s = documents_bs.size(1)
    causal_ss = torch.ones(s, s, dtype=torch.bool, device=documents_bs.device).tril()
    same_bss = documents_bs[:, :, None] == documents_bs[:, None, :]
    return (same_bss & causal_ss)[:, None]
