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


def stream_seed(seed: int, *, stage: int, part: int) -> int:
    """Return the seed of a rank's ordinary stream.

    Stages are 100 apart, as in Megatron-LM. Parts are far apart too: with equal seeds they would
    drop the same features of different tokens.

    Args:
        part: which tokens the rank sees between tensor-parallel regions. Ranks that see the same
            ones have to drop the same features.
    """
    return seed + 100 * stage + 1_000_003 * part


def renewed_seed(seed: int, iteration: int) -> int:
    """Return the seed of a run whose streams begin anew after `iteration`.

    It is none of those that a run starts from, or it would drop again what it dropped first.
    """
    return seed + 1_000_000_007 * iteration
