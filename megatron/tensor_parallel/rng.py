"""RNG states: which ranks draw the same random numbers and which draw their own; their seeds."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class RngTracker(Protocol):
    """RNG state that differs between tensor-parallel ranks."""

    def fork(self) -> AbstractContextManager[None]:
        """Draw from the tensor-parallel RNG state inside the `with` block."""
        ...


class OrdinaryStream:
    """A single rank: its tensor-parallel RNG state is the default one."""

    def fork(self) -> AbstractContextManager[None]:
        """Draw from the default RNG state."""
        return nullcontext()


def stream_seed(seed: int, *, stage: int, part: int) -> int:
    """Return the seed of a rank's default RNG state.

    Stages are 100 apart, as in Megatron-LM. With equal seeds, parts would drop the same features of
    different tokens.

    Args:
        part: index of the tokens that the rank sees outside tensor-parallel regions. Ranks with
            the same tokens have to drop the same features.
    """
    return seed + 100 * stage + 1_000_003 * part


def renewed_seed(seed: int, iteration: int) -> int:
    """Return the seed of a run whose RNG states are reset after `iteration`.

    It differs from the initial seeds, so that dropout does not repeat.
    """
    return seed + 1_000_000_007 * iteration
