"""Process pool: map a function over items in order, with a bound on items in flight.

Each process has a pipe of its own, which no other one writes to: whenever one is killed, also in
the middle of an answer, its pipe ends, and so does the wait for it. The executors of the standard
library share one pipe between their processes, and wait for the rest of such an answer for ever.
"""

import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from os import _exit
from queue import SimpleQueue
from typing import Any, TypeVar

from megatron.common.errors import MegatronError
from megatron.common.worker_process import start_whole

Item = TypeVar("Item")
Result = TypeVar("Result")

_BYTES_PER_WORKER = 4 << 20  # less than this is done before a process has started
ITEMS_PER_WORKER = 3  # read ahead, so that a slow item does not leave the others idle


class LostWorkerError(MegatronError):
    """A worker process has died, and its items in flight are lost."""


def map_in_processes(
    make_function: Callable[[], Callable[[Item], Result]],
    items: Iterable[Item],
    workers: int,
    *,
    size_of: Callable[[Item], int] | None = None,
    max_size: int = 0,
) -> Iterator[Result]:
    """Yield the function's result for every item, in order; an error it raises is raised here.

    Args:
        make_function: picklable; each process calls it once.
        size_of: an item's part of `max_size`; without it, only the number of items is bounded.
        max_size: of all items under way at a time; a larger one goes alone.

    Raises:
        LostWorkerError: a worker was killed.
    """
    team: list[_Worker] = []
    order: deque[tuple[_Worker, int]] = deque()  # whose answers come next
    held = 0
    try:
        team.extend(_Worker(make_function) for _ in range(workers))
        for item in items:
            size = size_of(item) if size_of else 0
            while order and held + size > max_size:
                worker, released = order.popleft()
                yield worker.answer(team)
                held -= released
            _receive(team, timeout_s=0)
            worker = min(team, key=lambda each: each.under_way)
            worker.give(item)
            order.append((worker, size))
            held += size
            if len(order) >= workers * ITEMS_PER_WORKER:
                worker, released = order.popleft()
                yield worker.answer(team)
                held -= released
        while order:
            yield order.popleft()[0].answer(team)
    finally:
        for worker in team:
            worker.process.kill()
        for worker in team:
            worker.process.join()


def share_cores(num_processes: int) -> None:
    """See to it that this process, one of `num_processes`, starts only its share of threads.

    Without it, the tokenizers library would start as many in each as there are cores.
    """
    value = os.environ.get("RAYON_NUM_THREADS", "")
    num_threads = int(value) if value.isdigit() else 0
    num_threads = num_threads or len(os.sched_getaffinity(0))
    os.environ["RAYON_NUM_THREADS"] = str(max(num_threads // num_processes, 1))


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
        return map(function, items)
    return map_in_processes(partial(_same, function), items, workers)


def _same(function: Callable[[Item], Result]) -> Callable[[Item], Result]:
    return function


def num_workers(total_bytes: int, most: int | None = None) -> int:
    """Return the number of processes worth starting for an input of this size, `most` at most."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, most or cores, total_bytes // _BYTES_PER_WORKER))


class _Worker:
    """A worker process, as its parent sees it."""

    def __init__(self, make_function: Callable[[], Callable[[Any], Any]]):
        # spawn: a fork would copy locks that other threads of this process may hold.
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, make_function), daemon=True)
        start_whole(self.process)
        theirs.close()
        self.under_way = 0
        self.answers: deque[tuple[Any, BaseException | None, str]] = deque()

    def give(self, item: Any) -> None:
        """Queue an item for this worker."""
        try:
            self.pipe.send(item)
        except OSError as error:
            raise _lost() from error
        self.under_way += 1

    def answer(self, team: Sequence["_Worker"]) -> Any:
        """Wait for its next answer, and keep those of the others for later."""
        while not self.answers:
            _receive(team, timeout_s=None)
        result, error, where = self.answers.popleft()
        if error is not None:
            raise error from RuntimeError(f"in a worker process:\n{where}")
        return result


def end_with_parent() -> None:
    """See to it that this process ends when its parent is killed, and not when interrupted."""
    # The parent is interrupted as well, and ends the others in good order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        _exit(1)


def _receive(team: Sequence[_Worker], *, timeout_s: float | None) -> None:
    """Receive the results that are ready, or wait for the first."""
    workers = {worker.pipe: worker for worker in team}
    for pipe in wait([*workers], timeout_s):
        worker = workers[pipe]  # type: ignore[index]
        try:
            worker.answers.append(worker.pipe.recv())
        except (EOFError, OSError) as error:
            raise _lost() from error
        worker.under_way -= 1


def _lost() -> LostWorkerError:
    return LostWorkerError("a worker process was killed, most often because memory ran out")


def _work(pipe: "Connection[Any, Any]", make_function: Callable[[], Callable[[Any], Any]]) -> None:
    end_with_parent()
    function = make_function()
    # A thread, so that giving never waits for an answer that waits to be taken.
    items: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_take_in, args=(pipe, items), daemon=True).start()
    while True:
        item = items.get()
        try:
            answer: tuple[Any, Exception | None, str] = (function(item), None, "")
        except Exception as error:
            answer = (None, error, traceback.format_exc())
        try:
            pipe.send(answer)
        except ConnectionError:
            return  # the parent no longer waits for it


def _take_in(pipe: "Connection[Any, Any]", items: "SimpleQueue[Any]") -> None:
    while True:
        try:
            items.put(pipe.recv())
        except (EOFError, OSError):
            return
