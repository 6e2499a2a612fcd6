"""Samples of finite data sets in shuffled epochs (distributed sampler), and each of them once."""

import sys
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.common.errors import WrongDataError
from megatron.data.sampling.batch_sampler import Sample, SampleSource
from megatron.data.sampling.epoch_plan import EpochPlan
from megatron.data.sampling.provenance import Origin


class ShuffledEpochs:
    """Endless sequence of shuffled epochs of a finite data set, in the order of torch's DistributedSampler.

    A permutation, padded by its beginning to a multiple of the replicas, is dealt out to them by
    turns. A smaller last batch is padded with samples of weight 0; its real samples weigh more, so
    that the mean loss is theirs.

    Args:
        source: the samples.
        seed: epoch e is permuted by seed + e.

    Raises:
        WrongDataError: an epoch has no batch.

    Randomness: torch.randperm with a separate generator.
    """

    def __init__(self, source: SampleSource, plan: EpochPlan, *, seed: int):
        self.source, self.plan, self._seed = source, plan, seed
        self._epoch, self._permutation = -1, np.empty(0, np.int64)
        if not plan.steps:
            raise WrongDataError(
                f"{plan.samples} samples are less than a global batch of {plan.global_batch_size}: "
                "write a smaller --global-batch-size or --micro-batch-size, or --keep-last-batch"
            )

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, position: int) -> Sample:
        sample, weight = self._at(position)
        return weighted_sample(self.source, sample, weight)

    def origin(self, position: int) -> Origin:
        """Return the number of the sample at a position."""
        return Origin("labelled data", self._at(position)[0], ())

    def _at(self, position: int) -> tuple[int, float]:
        """Return the number and the weight of the sample at a position."""
        plan = self.plan
        epoch, position = divmod(position, plan.steps * plan.global_batch_size)
        turn, within = divmod(position, plan.micro_batch_size * plan.replicas)
        replica, row = divmod(within, plan.micro_batch_size)
        index = (turn * plan.micro_batch_size + row) * plan.replicas + replica
        first = position // plan.global_batch_size * plan.global_batch_size
        real = min(plan.global_batch_size, plan.padded - first)
        weight = plan.global_batch_size / real if index < plan.padded else 0.0
        return int(self._epoch_order(epoch)[index % plan.samples]), weight

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            permutation = torch.randperm(self.plan.samples, generator=generator)
            self._permutation, self._epoch = permutation.numpy(), epoch
        return self._permutation


class EachOnce:
    """All samples of a finite data set once, in order, filled up with weight 0 to full micro-batches.

    Args:
        turn: samples that all replicas read at a time.
    """

    def __init__(self, source: SampleSource, *, turn: int):
        self.source = source
        self._length = -(-len(source) // turn) * turn

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> Sample:
        is_real = i < len(self.source)
        return weighted_sample(self.source, i if is_real else 0, float(is_real))

    def origin(self, i: int) -> Origin:
        """Return the number of the sample at a position."""
        return Origin("labelled data", min(i, len(self.source) - 1), ())


def weighted_sample(source: SampleSource, i: int, weight: float) -> Mapping[str, NDArray]:
    """Return a sample with its number and its weight."""
    return {**source[i], "index": np.array(i), "weight": np.array(weight, np.float32)}
