"""Process pool: map a function over items in order, with a bound on items in flight.

Each worker has a pipe of its own: when one is killed, even while it sends a result, its pipe ends
and so does the wait for it. The executors of the standard library share one pipe between their
workers, and then wait for the rest of the result for ever.
"""

import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from os import _exit
from queue import SimpleQueue
from typing import Any, TypeVar

from megatron.common.errors import MegatronError

Item = TypeVar("Item")
Result = TypeVar("Result")

_BYTES_PER_WORKER = 4 << 20  # less input takes less time than the start of a process
ITEMS_PER_WORKER = 3  # in flight, so that a slow item does not leave the other workers idle
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class LostWorkerError(MegatronError):
    """A worker process was killed; its items in flight are lost."""


def map_in_processes(
    make_function: Callable[[], Callable[[Item], Result]], items: Iterable[Item], workers: int
) -> Iterator[Result]:
    """Yield the function's result for every item, in order; an error it raises is raised here.

    Args:
        make_function: picklable; each process calls it once.
        workers: processes; with 1 or fewer, this process does the work.

    Raises:
        LostWorkerError: a worker was killed.
    """
    if workers <= 1:
        yield from map(make_function(), items)
        return
    team: list[_Worker] = []
    order: deque[_Worker] = deque()  # the workers of the items in flight
    try:
        team.extend(_Worker(make_function) for _ in range(workers))
        for item in items:
            _receive(team, timeout_s=0)
            worker = min(team, key=lambda each: each.in_flight)
            worker.send(item)
            order.append(worker)
            if len(order) >= workers * ITEMS_PER_WORKER:
                yield order.popleft().result(team)
        while order:
            yield order.popleft().result(team)
    finally:
        for worker in team:
            worker.process.kill()
        for worker in team:
            worker.process.join()


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Iterator[Result]:
    """Yield function(item) of every item, in order; see `map_in_processes`.

    Args:
        function: picklable; it is sent to each process once.

    Raises:
        LostWorkerError: a worker was killed.
    """
    return map_in_processes(partial(_identity, function), items, workers)


def _identity(function: Callable[[Item], Result]) -> Callable[[Item], Result]:
    return function


def share_cores(num_processes: int) -> None:
    """Limit the threads of this process, one of `num_processes`, to its share of the cores.

    Otherwise the tokenizers library starts as many threads in each process as there are cores.
    """
    value = os.environ.get("RAYON_NUM_THREADS", "")
    num_threads = int(value) if value.isdigit() else 0
    num_threads = num_threads or len(os.sched_getaffinity(0))
    os.environ["RAYON_NUM_THREADS"] = str(max(num_threads // num_processes, 1))


def num_workers(total_bytes: int, most: int | None = None) -> int:
    """Return the number of processes worth starting for an input of this size, at most `most`."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, most or cores, total_bytes // _BYTES_PER_WORKER))


class _Worker:
    """Parent's side of a worker process: its pipe, and the results received from it."""

    def __init__(self, make_function: Callable[[], Callable[[Any], Any]]):
        # spawn: a fork would copy locks that other threads of this process may hold.
        context = get_context("spawn")
        self.pipe, child_end = context.Pipe()
        self.process = context.Process(target=_work, args=(child_end, make_function), daemon=True)
        _start(self.process)
        child_end.close()
        self.in_flight = 0
        self.results: deque[tuple[Any, BaseException | None, str]] = deque()

    def send(self, item: Any) -> None:
        """Queue an item for this worker."""
        try:
            self.pipe.send(item)
        except OSError as error:
            raise _lost_worker() from error
        self.in_flight += 1

    def result(self, team: Sequence["_Worker"]) -> Any:
        """Wait for its next result; results of other workers are kept for later."""
        while not self.results:
            _receive(team, timeout_s=None)
        result, error, trace = self.results.popleft()
        if error is not None:
            raise error from RuntimeError(f"in a worker process:\n{trace}")
        return result


def _start(process: BaseProcess) -> None:
    """Start `process` with SIGINT blocked; signals to this process are delivered afterwards.

    Interrupted in between, this process would leave a worker without its arguments; and a worker
    that is interrupted while it imports its modules prints a traceback.
    """
    if threading.current_thread() is not threading.main_thread():
        process.start()  # signals interrupt the main thread alone
        return
    resource_tracker.ensure_running()  # its start would unblock SIGINT
    received: list[int] = []
    handlers = {
        each: signal.signal(each, lambda number, _: received.append(number))
        for each in _STOP_SIGNALS
    }
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by the worker
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for each in received:
        signal.raise_signal(each)


def _receive(team: Sequence[_Worker], *, timeout_s: float | None) -> None:
    """Receive the results that are ready, or wait for the first."""
    workers = {worker.pipe: worker for worker in team}
    for pipe in wait([*workers], timeout_s):
        worker = workers[pipe]  # type: ignore[index]
        try:
            worker.results.append(worker.pipe.recv())
        except (EOFError, OSError) as error:
            raise _lost_worker() from error
        worker.in_flight -= 1


def _lost_worker() -> LostWorkerError:
    return LostWorkerError("a worker process was killed, most often because memory ran out")


def _work(pipe: "Connection[Any, Any]", make_function: Callable[[], Callable[[Any], Any]]) -> None:
    """Run a worker process: receive items and send results, until the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this one
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    function = make_function()
    # Items are received in a thread, so that the parent never blocks on a full pipe of items
    # while this process blocks on a full pipe of results.
    items: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_receive_items, args=(pipe, items), daemon=True).start()
    while True:
        item = items.get()
        try:
            result: tuple[Any, Exception | None, str] = (function(item), None, "")
        except Exception as error:
            result = (None, error, traceback.format_exc())
        try:
            pipe.send(result)
        except ConnectionError:
            return  # the parent has ended


def _receive_items(pipe: "Connection[Any, Any]", items: "SimpleQueue[Any]") -> None:
    while True:
        try:
            items.put(pipe.recv())
        except (EOFError, OSError):
            return


def _exit_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        _exit(1)
