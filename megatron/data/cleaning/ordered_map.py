"""A function over many items in many processes, in order, with a bound on what is under way."""

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

from megatron.common.process_pool import map_in_processes

Item = TypeVar("Item")
Result = TypeVar("Result")

_BYTES_PER_WORKER = 4 << 20  # less than this is done before a process has started


def num_workers(total_bytes: int, most: int | None = None) -> int:
    """Return how many processes are worth starting for so much input, `most` at most."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, most or cores, total_bytes // _BYTES_PER_WORKER))


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Iterator[Result]:
    """Yield function(item) of every item, in order; with one worker, this process does it.

    Args:
        function: picklable; it is sent to each process once.

    Raises:
        LostWorkerError: a worker was killed.
    """
    if workers == 1:
        yield from map(function, items)
    else:
        yield from map_in_processes(partial(_same, function), items, workers)


def _same(function: Callable[[Item], Result]) -> Callable[[Item], Result]:
    return function
