"""A process group without processes, whose other ranks send what this one sends; it counts bytes."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class CountedGroup:
    """Stands in for a group in this process's collectives.

    `bytes` has for each kind of collective those of floating-point tensors that this rank gives.
    """

    def __init__(self, size: int, rank: int = 0):
        self._size, self._rank = size, rank
        self.bytes: Counter[str] = Counter()

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def all_to_all_single(
        self, output: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int], *_: Any
    ) -> "_Done":
        if sent:  # what other ranks would compute from it is not known
            output.zero_()
        else:
            output.copy_(given.chunk(self._size)[self._rank].repeat(self._size))
        return self._count("all-to-all", given)

    def all_gather_single(self, output: Tensor, given: Tensor, *_: Any) -> "_Done":
        output.copy_(torch.cat([given] * self._size))
        return self._count("all-gather", given)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, *_: Any) -> "_Done":
        output.copy_(given.chunk(self._size)[self._rank] * self._size)
        return self._count("reduce-scatter", given)

    def allreduce(self, tensors: Sequence[Tensor], *_: Any) -> "_Done":
        for each in tensors:
            each *= self._size
        return self._count("all-reduce", tensors[0])

    def _count(self, kind: str, given: Tensor) -> "_Done":
        self.bytes[kind] += given.nbytes * given.is_floating_point()
        return _Done()


class _Done:
    def wait(self) -> None:
        """Return at once."""
