"""What part of a whole each of several weights is, the same on every version of Python."""

import math
from collections.abc import Sequence

import numpy as np

from megatron.config.data.corpora import SampleOrder


def shares_of(weights: Sequence[float], sample_order: SampleOrder = "bigscience") -> list[float]:
    """Return `weights` divided by their sum.

    Raises:
        ValueError: a weight is negative or no number, or there is none above 0.

    Source: in float64, BigScience's Megatron-DeepSpeed adds one weight after the other, and
        Megatron Core calls numpy's sum, which adds from 8 weights on in several lanes.
    """
    if sample_order == "megatron-core":
        total = float(np.sum(np.array(weights, np.float64)))
    else:
        total = _sum_in_turn(weights)
    if not weights or min(weights) < 0 or not 0 < total < math.inf:
        raise ValueError(f"weights {list(weights)}: each is 0 or more, and one is above 0")
    return [weight / total for weight in weights]


def _sum_in_turn(weights: Sequence[float]) -> float:
    total = 0.0
    # Not sum(): since Python 3.12 it rounds once at the end, and some orders would be others.
    for weight in weights:
        total += weight
    return total
