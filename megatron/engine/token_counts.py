"""One weight for every token of a global batch, however many count in each micro-batch."""

from collections.abc import Iterator
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.tensor_parallel.broadcast import Batch


class TokenCounts:
    """Mean number of tokens that count in the micro-batches of a step (--calculate-per-token-loss).

    A loss that divides the sum over its micro-batch by this mean, instead of by its own tokens, has
    as its mean over all micro-batches and ranks the mean over all tokens of the global batch.

    Args:
        group: ranks whose losses are averaged: replicas, and parts of their samples.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._mean: Tensor | None = None

    def mean(self) -> Tensor:
        """Return the mean number of tokens of the micro-batches that `read` yields, a scalar."""
        if self._mean is None:
            raise ValueError("the tokens of a step are counted while its batches are read")
        return self._mean

    def read(self, batches: Iterator[Batch], number: int) -> Iterator[Batch]:
        """Yield `number` micro-batches, all of which are read before the first.

        Communication: one all-reduce of a scalar.
        """
        ahead = list(islice(batches, number))
        count = torch.stack([batch["loss_mask"].sum() for batch in ahead]).sum()
        dist.all_reduce(count, group=self._group)
        # Where nothing counts the loss is 0, not 0 / 0.
        self._mean = count.clamp(min=1) / (number * self._group.size())
        yield from ahead
