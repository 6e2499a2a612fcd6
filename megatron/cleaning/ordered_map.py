"""A function over many items in many processes, in order, with a bound on what is under way."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, ClassVar, TypeVar

from megatron.data.workers import end_with_parent
from megatron.errors import MegatronError

Item = TypeVar("Item")
Result = TypeVar("Result")

_ITEMS_PER_WORKER = 3  # read ahead, so that a slow item does not leave the others idle
_BYTES_PER_WORKER = 4 << 20  # less than this is done before a process has started


class _Worker:
    """What a worker process keeps from one item to the next."""

    function: ClassVar[Callable[[Any], Any]]


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
        MegatronError: a worker was killed.
    """
    if workers == 1:
        yield from map(function, items)
        return
    # spawn: a fork would copy locks that other threads of this process may hold.
    executor = ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_start, initargs=(function,)
    )
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(executor.submit(_call, item))
            if len(pending) >= workers * _ITEMS_PER_WORKER:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise MegatronError(
            "a worker process was killed, most often because memory ran out"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


def _start(function: Callable[[Any], Any]) -> None:
    end_with_parent()
    _Worker.function = function


def _call(item: Any) -> Any:
    return _Worker.function(item)
