"""The training batches of a run, from where it stands."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.engine.engine import MicroBatch
from megatron.training.state import TrainState

Batches = Callable[[int], Iterator[Any]]
"""Yields micro-batches from a number of consumed samples on."""


class Stream(Iterator[Any]):
    """Micro-batches from a position that can be changed."""

    def __init__(self, batches: Batches, samples: int):
        self._batches = batches
        self.seek(samples)

    def __next__(self) -> Any:
        """Return the next micro-batch."""
        return next(self._iterator)

    def seek(self, samples: int) -> None:
        """Go on behind `samples` consumed samples."""
        self._iterator = self._batches(samples)


def shortened(batches: Iterator[MicroBatch], length: Callable[[], int]) -> Iterator[MicroBatch]:
    """Yield micro-batches cut to their first `length()` positions, asked for each anew."""
    for inputs, target in batches:
        tokens = length()
        yield _cut(inputs, tokens), _cut(target, tokens)


def _cut(tensors: Sequence[Any], tokens: int) -> Any:
    return tuple(tensor[:, :tokens].contiguous() for tensor in tensors)


def length_of_next_step(length_at: Callable[[int], int], state: TrainState) -> Callable[[], int]:
    """Return a function that says how long the samples of the step after `state` are."""
    return lambda: length_at(state.iteration + 1)
