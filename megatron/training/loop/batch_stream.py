"""Data loader of training: an iterator over micro-batches that can seek to a sample."""

from collections.abc import Callable, Generator, Iterator
from typing import Any

from megatron.checkpointing.train_state import TrainState

Batches = Callable[[int], Iterator[Any]]
"""Yields micro-batches from a number of consumed samples on."""


class Stream(Iterator[Any]):
    """Micro-batches from a position that can be changed."""

    def __init__(self, batches: Batches, samples: int):
        self._batches = batches
        self._iterator = batches(samples)

    def __next__(self) -> Any:
        """Return the next micro-batch."""
        return next(self._iterator)

    def seek(self, samples: int) -> None:
        """Continue after `samples` consumed samples; what was read ahead is dropped."""
        self.close()
        self._iterator = self._batches(samples)

    def close(self) -> None:
        """Read no further."""
        if isinstance(self._iterator, Generator):
            self._iterator.close()


def length_of_next_step(length_at: Callable[[int], int], state: TrainState) -> Callable[[], int]:
    """Return a function that computes the sequence length of the step after `state` (curriculum)."""
    return lambda: length_at(state.iteration + 1)
