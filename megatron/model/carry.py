"""What travels between layers: the activations, and what attention has to know of the tokens.

An s x s mask would be larger than the activations. But what a token sees is one stretch of
positions in every objective here: the text before it, its own document up to it, or a prefix as
a whole. So two numbers for each token are enough, and their shape never changes; they travel when
they do not follow from the order of the tokens. The position travels when layers turn queries and
keys by it.
"""

from torch import Tensor

Carried = Tensor | tuple[Tensor, ...]
"""x, then what there is of positions_bs [b, s] int64 and spans_bs2 [b, s, 2] int64: the first
position that a token sees and the one after the last. Every token sees itself."""


def unpack(carried: Carried) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the activations, the positions and the spans; None for what does not travel."""
    if isinstance(carried, Tensor):
        return carried, None, None
    x, *places = carried
    by_dims = {place.dim(): place for place in places}
    return x, by_dims.get(2), by_dims.get(3)


def pack(x: Tensor, *places: Tensor | None) -> Carried:
    """Return what the next layer gets."""
    given = [place for place in places if place is not None]
    return (x, *given) if given else x
