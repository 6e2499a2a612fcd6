"""Cyclic data order (`--dataloader-type cyclic`): a new permutation of the samples each epoch."""

import sys

import numpy as np

from megatron.data.sampling.batch_sampler import Sample
from megatron.data.sampling.provenance import Origin, TracedSource


class CyclicDataset:
    """The endless sequence of permutations of a data set, one after the other.

    Position p is sample `permutation[p % n]` of the permutation number `p // n`, n being the
    samples of the data set: a function of the samples consumed, whatever the layout.

    Randomness: permutation e is numpy.random.RandomState([seed, e]).permutation(n).
    """

    def __init__(self, dataset: TracedSource, *, seed: int):
        self.dataset = dataset
        self._seed = seed
        self._epoch = -1
        self._permutation = np.empty(0, np.int64)

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, position: int) -> Sample:
        return self.dataset[self._sample(position)]

    def origin(self, position: int) -> Origin:
        """Return the token spans of a position on disk."""
        return self.dataset.origin(self._sample(position))

    def _sample(self, position: int) -> int:
        epoch, index = divmod(position, len(self.dataset))
        if epoch != self._epoch:
            rng = np.random.RandomState([self._seed % 2**32, epoch])
            self._permutation, self._epoch = rng.permutation(len(self.dataset)), epoch
        return int(self._permutation[index])
