"""Batches of an epoch of a finite data set: sizes and number."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """How the batches of an epoch are made of so many samples.

    Args:
        samples: of the data set.
        micro_batch_size: of each replica.
        replicas: that divide a batch.
        global_batch_size: samples of an optimizer step.
        keeps_last: whether the last samples of an epoch make a smaller batch; else they are left
            out of it.
    """

    samples: int
    micro_batch_size: int
    replicas: int
    global_batch_size: int
    keeps_last: bool

    @property
    def padded(self) -> int:
        """Samples of an epoch with those that are repeated, so that replicas have equally many."""
        return -(-self.samples // self.replicas) * self.replicas

    @property
    def steps(self) -> int:
        """Optimizer steps of an epoch."""
        if self.keeps_last:
            return -(-self.padded // self.global_batch_size)
        return self.padded // self.global_batch_size
