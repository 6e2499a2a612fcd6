"""Random streams: which ranks draw the same numbers and which draw their own."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class RngTracker(Protocol):
    """The stream of numbers that differs between tensor-parallel ranks."""

    def fork(self) -> AbstractContextManager[None]:
        """Draw from the tensor-parallel stream inside the `with` block."""
        ...


class OrdinaryStream:
    """One rank alone: its tensor-parallel stream is the ordinary one."""

    def fork(self) -> AbstractContextManager[None]:
        """Draw from the ordinary stream."""
        return nullcontext()


def stream_seed(seed: int, *, stage: int, data_rank: int) -> int:
    """Return the seed of a rank's ordinary stream, the same on all its tensor-parallel ranks.

    Stages are 100 apart, as in Megatron-LM. Replicas are far apart too: with equal seeds they
    would drop the same features of different samples.
    """
    return seed + 100 * stage + 1_000_003 * data_rank
