"""Engine thread: HTTP handlers submit requests to it; they join the batch between engine steps."""

import asyncio
import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch
from fastapi import Request as HTTPRequest

from megatron.common.errors import ConfigError, MegatronError
from megatron.inference.engine.continuous_batching import ExclusiveRequest
from megatron.inference.engine.sequence import (
    Completion,
    CompletionBuilder,
    Counters,
    Event,
    Request,
)
from megatron.training.process.stack_dump import place_of

log = logging.getLogger(__name__)

_HEARTBEAT_S = 5.0
"""Interval of steps of an idle engine, which keep the other ranks from timing out."""

_FAILED = "the engine has failed; see the server's log"
_CLOSING = "the server is shutting down"

Result = TypeVar("Result")
JobRequest = Request | ExclusiveRequest[Any]
JobEvent = Event | list[Any] | Exception
"""Output of a job: events of a request, the results of an exclusive one, or an error."""


class ServingEngine(Protocol):
    """The engine of a server: continuous batching, or `SerialEngine` of an encoder."""

    rows: int
    max_length: int
    runner: Any
    counters: Counters

    @property
    def is_busy(self) -> bool:
        """Whether the next step has work."""
        ...

    def problems(self, request: Request) -> Iterator[str]:
        """Yield every reason to refuse a request."""
        ...

    def add(self, request: Request) -> int:
        """Add a request; return its id."""
        ...

    def cancel(self, request_id: int) -> None:
        """Cancel a sequence."""
        ...

    def step(self) -> list[Event]:
        """Run one step of all sequences."""
        ...

    def run_alone(
        self, request: ExclusiveRequest[Any], should_continue: Callable[[], bool]
    ) -> list[Any]:
        """Run an exclusive request, and return its results."""
        ...

    def close(self) -> None:
        """End the engines of the other ranks."""
        ...


class Unavailable(Exception):
    """The server cannot take the request now (status 503)."""


class Job:
    """A submitted request. `emit` is called in the engine's thread."""

    def __init__(self, request: JobRequest, emit: Callable[[JobEvent], None]):
        self.request, self.emit = request, emit
        self.request_id: int | None = None  # the engine's, once it is running
        self.is_cancelled = False


class EngineThread:
    """Runs the engine in a thread, with a queue of jobs in the order of arrival.

    An exclusive request, such as a beam search, runs alone: it starts when the jobs before it have
    finished, and later jobs wait.

    Args:
        queue: jobs that may wait before `submit` refuses further ones.
        on_failure: called in the engine's thread when the engine has failed.
    """

    def __init__(
        self, engine: ServingEngine, *, queue: int, on_failure: Callable[[], None] = lambda: None
    ):
        self.engine, self.queue, self.on_failure = engine, queue, on_failure
        self.failure: Exception | None = None
        self.num_tokens = 0  # generated so far
        self.num_prompt_tokens = 0  # of all submitted jobs
        self._change = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        self._exclusive: Job | None = None
        self._cancelled: list[int] = []
        self._closes_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Number of jobs in the queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Number of running sequences and exclusive requests."""
        return len(self._running) + (self._exclusive is not None)

    @property
    def is_open(self) -> bool:
        """Whether jobs are accepted."""
        return self.failure is None and self._closes_at is None

    def submit(
        self,
        requests: Sequence[JobRequest],
        emit: Callable[[int, JobEvent], None],
    ) -> list[Job]:
        """Queue jobs; `emit` gets the index in `requests` with each event.

        Raises:
            Unavailable: the queue is full, or the thread is closing.
        """

        def emit_for(index: int) -> Callable[[JobEvent], None]:
            return lambda event: emit(index, event)

        jobs = [Job(request, emit_for(index)) for index, request in enumerate(requests)]
        with self._change:
            if self.failure is not None:
                raise Unavailable(_FAILED)
            if self._closes_at is not None:
                raise Unavailable(_CLOSING)
            if len(self._waiting) >= self.queue:
                raise Unavailable(f"{len(self._waiting)} sequences are waiting: try again later")
            self._waiting += jobs
            self.num_prompt_tokens += sum(
                len(tokens)
                for request in requests
                for tokens in (request.prompt, *request.contexts)
            )
            self._change.notify()
        return jobs

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Cancel jobs, which emit nothing more; no effect on finished ones."""
        with self._change:
            for job in jobs:
                job.is_cancelled = True
                if job.request_id in self._running:
                    self._cancelled.append(job.request_id)
            if any(job.is_cancelled for job in self._waiting):
                self._waiting = deque(job for job in self._waiting if not job.is_cancelled)
            self._change.notify()

    def has_ended(self) -> bool:
        """Return whether the thread has ended; wakes an idle one, which then sees `drain`."""
        with self._change:
            self._change.notify()
        return not self._thread.is_alive()

    def drain(self, grace_s: float) -> None:
        """Accept no more jobs, and drop those unfinished after `grace_s`. Safe in signal handlers."""
        # Without the lock, which the interrupted code may hold; the thread looks at each step.
        self._closes_at = time.monotonic() + grace_s

    def is_hung(self, last_step_s: float) -> bool:
        """Return whether the thread still runs `last_step_s` after the grace time of `drain`."""
        return self._remaining_s(last_step_s) <= 0 and self._thread.is_alive()

    def close(self, last_step_s: float = math.inf) -> None:
        """Drop unfinished jobs, end `InferenceEngine.follow` on the other ranks, and join the thread.

        Args:
            last_step_s: longest wait for the current step; see `is_hung`.
        """
        self._closes_at = min(time.monotonic(), self._closes_at or math.inf)
        with self._change:
            self._change.notify()
        remaining_s = self._remaining_s(last_step_s)
        self._thread.join(None if remaining_s == math.inf else max(0.0, remaining_s))

    @property
    def current_function(self) -> str:
        """Function that the thread executes, with its file and line."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return place_of(frame) if frame else "no function"

    def _remaining_s(self, last_step_s: float) -> float:
        closes_at = math.inf if self._closes_at is None else self._closes_at
        return closes_at + last_step_s - time.monotonic()

    def _run(self) -> None:
        try:
            if self.engine.runner.device.type == "cuda":
                torch.cuda.set_device(self.engine.runner.device)
            while self._wait_for_work():
                if exclusive := self._admit():
                    self._run_alone(*exclusive)
                else:
                    self._step()
            self._drop(Unavailable(_CLOSING))
            self.engine.close()
        except Exception as error:
            log.exception("the engine has failed, and nothing more can be generated")
            self.failure = error
            self._drop(Unavailable(_FAILED))
            self.on_failure()

    def _wait_for_work(self) -> bool:
        """Wait for jobs, at most one heartbeat; return False to end the thread."""
        with self._change:
            if not (self._waiting or self._running or self._cancelled) and self._closes_at is None:
                self._change.wait(_HEARTBEAT_S)
            if self._closes_at is None:
                return True
            return bool(self._waiting or self._running) and not self._is_past_deadline

    def _admit(self) -> tuple[Job, ExclusiveRequest[Any]] | None:
        """Add waiting jobs to the engine while there are free rows.

        Returns:
            An exclusive request to run next, with its job.
        """
        with self._change:
            for request_id in self._cancelled:
                self.engine.cancel(request_id)
            self._cancelled.clear()
            while self._waiting and len(self._running) < self.engine.rows:
                job = self._waiting[0]
                if isinstance(job.request, ExclusiveRequest):
                    if self._running or self.engine.is_busy:
                        return None
                    self._exclusive = self._waiting.popleft()
                    return self._exclusive, job.request
                self._waiting.popleft()
                try:
                    job.request_id = self.engine.add(job.request)
                except ConfigError as error:
                    job.emit(error)
                else:
                    self._running[job.request_id] = job
        return None

    def _step(self) -> None:
        for event in self.engine.step():
            self.num_tokens += event.new_token is not None
            with self._change:
                job = self._running.get(event.request_id)
                if job and event.finish_reason:
                    del self._running[event.request_id]
            if job and not job.is_cancelled:
                job.emit(self._nonfinite() if event.finish_reason == "failed" else event)

    def _run_alone(self, job: Job, request: ExclusiveRequest[Any]) -> None:
        event: JobEvent
        try:
            found = self.engine.run_alone(
                request,
                should_continue=lambda: not (job.is_cancelled or self._is_past_deadline),
            )
        except ConfigError as error:
            event = error
        except MegatronError:
            event = self._nonfinite()
        else:
            event = found or Unavailable(_CLOSING)
            self.num_tokens += sum(len(one.tokens) for one in found)
        self._exclusive = None
        if not job.is_cancelled:
            job.emit(event)

    def _nonfinite(self) -> Unavailable:
        return Unavailable(str(self.engine.runner.nonfinite_logits_error()))

    @property
    def _is_past_deadline(self) -> bool:
        """Whether the grace time of `drain` is over."""
        return self._closes_at is not None and time.monotonic() >= self._closes_at

    def _drop(self, reason: Exception) -> None:
        with self._change:
            jobs = [*self._running.values(), *self._waiting]
            if self._exclusive:
                jobs.append(self._exclusive)
            self._running.clear()
            self._waiting.clear()
        for job in jobs:
            if not job.is_cancelled:
                job.emit(reason)


class PendingRequests:
    """Requests submitted by an HTTP handler; leaving the context cancels the unfinished ones.

    Raises:
        Unavailable: the queue is full, or the server is shutting down.
    """

    def __init__(self, engine_thread: EngineThread, requests: Sequence[JobRequest]):
        self._engine_thread, self._requests = engine_thread, requests
        self._events: asyncio.Queue[tuple[int, JobEvent]] = asyncio.Queue()
        event_loop = asyncio.get_running_loop()

        def emit(index: int, event: JobEvent) -> None:
            with suppress(RuntimeError):  # the event loop has been closed
                event_loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

        self._jobs = engine_thread.submit(requests, emit)

    def __enter__(self) -> "PendingRequests":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._engine_thread.cancel(self._jobs)

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Yield the events of all requests, each with the request's index.

        Raises:
            Unavailable: the server shuts down before the requests have finished.
        """
        left = len(self._requests)
        while left:
            index, event = await self._next()
            assert isinstance(event, Event), "an exclusive request has no events"
            left -= event.finish_reason is not None
            yield index, event

    async def completions(self) -> list[Completion]:
        """Return the completion of each request; raises as `events` does."""
        builders = [CompletionBuilder(request.prompt) for request in self._requests]
        async for index, event in self.events():
            builders[index].add(event)
        return [builder.build() for builder in builders]

    async def results(self) -> list[Any]:
        """Return the results of the only request, which is exclusive.

        Raises:
            ConfigError: the request is impossible.
            Unavailable: the server shuts down.
        """
        _, event = await self._next()
        assert isinstance(event, list), "a request has no results"
        return event

    async def _next(self) -> tuple[int, Event | list[Any]]:
        index, event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        return index, event


class ClientGone(Exception):
    """The client has disconnected."""


async def while_connected(
    http: HTTPRequest, work: Callable[[], Coroutine[Any, Any, Result]]
) -> Result:
    """Await `work`; cancel it when the client disconnects.

    Raises:
        ClientGone: the client has disconnected.
    """

    async def wait_for_disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.create_task(work()), asyncio.create_task(wait_for_disconnect())
    working, _ = tasks
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
