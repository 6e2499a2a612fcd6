"""What part of a whole each of several weights is, the same on every version of Python."""

import math
from collections.abc import Sequence


def shares_of(weights: Sequence[float]) -> list[float]:
    """Return `weights` divided by their sum.

    Raises:
        ValueError: a weight is negative or no number, or there is none above 0.

    Source: Megatron-LM, which adds one weight after the other in float64.
    """
    total = 0.0
    # Not sum(): since Python 3.12 it rounds once at the end, and some orders would be others.
    for weight in weights:
        total += weight
    if not weights or min(weights) < 0 or not 0 < total < math.inf:
        raise ValueError(f"weights {list(weights)}: each is 0 or more, and one is above 0")
    return [weight / total for weight in weights]
