"""The random stream of one sample: what is drawn for it depends on nothing else."""

import numpy as np


def sample_rng(seed: int, i: int) -> np.random.RandomState:
    """Return the stream of sample i, the same on every rank, stage and after every resumption.

    Randomness: numpy.random.RandomState([seed, low half of i, high half of i]).
    """
    return np.random.RandomState([seed % 2**32, i % 2**32, i >> 32])
