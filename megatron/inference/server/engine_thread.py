"""The engine's own thread: what many clients ask for joins and leaves between its steps."""

import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from megatron.common.errors import ConfigError, MegatronError
from megatron.inference.engine.beam_search import Beam, Search
from megatron.inference.engine.continuous_batching import Engine
from megatron.inference.engine.request import Event, Request
from megatron.training.process.stack_dump import place_of

log = logging.getLogger(__name__)

_HEARTBEAT_S = 5.0
"""An engine without work steps so often: ranks that follow it would take silence for death."""

_FAILED = "the engine has failed; the server's log says why"
_CLOSING = "the server is shutting down"

Told = Event | list[Beam] | Exception
"""What a job hears: events up to one with a reason, or the beams of a search, or why not."""


class Unavailable(Exception):
    """Nothing more can be taken on now."""


class Job:
    """A request or a search on its way. `tell` is called in the engine's thread."""

    def __init__(self, asked: Request | Search, tell: Callable[[Told], None]):
        self.asked, self.tell = asked, tell
        self.number: int | None = None  # the engine's, once it has been taken
        self.is_cancelled = False


class EngineLoop:
    """Gives an engine the jobs of many clients, in the order in which they came.

    A beam search needs the engine for itself: those before it are finished first, and those
    behind it wait.

    Args:
        queue: so many jobs may wait; see `submit`.
        on_failure: called in the engine's thread when it fails, which is its end.
    """

    def __init__(
        self, engine: Engine, *, queue: int, on_failure: Callable[[], None] = lambda: None
    ):
        self.engine, self.queue, self.on_failure = engine, queue, on_failure
        self.failure: Exception | None = None
        self.num_tokens = 0  # that have been chosen, of all sequences
        self.num_prompt_tokens = 0  # of the jobs that were taken
        self._change = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        self._searching: Job | None = None
        self._gone: list[int] = []
        self._closes_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """How many jobs wait for their turn."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """How many sequences and searches are under way."""
        return len(self._running) + (self._searching is not None)

    @property
    def is_open(self) -> bool:
        """Whether jobs are taken."""
        return self.failure is None and self._closes_at is None

    def submit(
        self, asked: Sequence[Request | Search], tell: Callable[[int, Told], None]
    ) -> list[Job]:
        """Take all of the jobs; `tell(place, told)` hears of the one at each place of `asked`.

        Raises:
            Unavailable: `queue` jobs are waiting, or the loop ends.
        """

        def teller(place: int) -> Callable[[Told], None]:
            return lambda told: tell(place, told)

        jobs = [Job(one, teller(place)) for place, one in enumerate(asked)]
        with self._change:
            if self.failure is not None:
                raise Unavailable(_FAILED)
            if self._closes_at is not None:
                raise Unavailable(_CLOSING)
            if len(self._waiting) >= self.queue:
                raise Unavailable(f"{len(self._waiting)} sequences are waiting: try again later")
            self._waiting += jobs
            self.num_prompt_tokens += sum(len(one.prompt) for one in asked)
            self._change.notify()
        return jobs

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Let jobs go, of which nothing more is to be heard; those that have ended are left."""
        with self._change:
            for job in jobs:
                job.is_cancelled = True
                if job.number in self._running:
                    self._gone.append(job.number)
            if any(job.is_cancelled for job in self._waiting):
                self._waiting = deque(job for job in self._waiting if not job.is_cancelled)
            self._change.notify()

    def has_ended(self) -> bool:
        """Whether the engine's thread has ended; one that waits for work looks for the end now."""
        with self._change:
            self._change.notify()
        return not self._thread.is_alive()

    def drain(self, grace_s: float) -> None:
        """Take no more jobs, and drop those that have not ended in time. A signal may call this."""
        # Without the lock, which the interrupted code may hold; the thread looks at each step.
        self._closes_at = time.monotonic() + grace_s

    def is_hung(self, last_step_s: float) -> bool:
        """Whether the engine has not ended `last_step_s` after the time of `drain` was over."""
        return self._remaining_s(last_step_s) <= 0 and self._thread.is_alive()

    def close(self, last_step_s: float = math.inf) -> None:
        """Drop what is left, let the other ranks go, and wait for the thread's end.

        Args:
            last_step_s: how long to wait for the step that is under way; see `is_hung`.
        """
        self._closes_at = min(time.monotonic(), self._closes_at or math.inf)
        with self._change:
            self._change.notify()
        remaining_s = self._remaining_s(last_step_s)
        self._thread.join(None if remaining_s == math.inf else max(0.0, remaining_s))

    @property
    def place(self) -> str:
        """Where the engine's thread is: a function with its file and line."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return place_of(frame) if frame else "no function"

    def _remaining_s(self, last_step_s: float) -> float:
        closes_at = math.inf if self._closes_at is None else self._closes_at
        return closes_at + last_step_s - time.monotonic()

    def _run(self) -> None:
        try:
            if self.engine.stage.device.type == "cuda":
                torch.cuda.set_device(self.engine.stage.device)
            while self._goes_on():
                search = self._admit()
                if search:
                    self._search(search)
                else:
                    self._step()
            self._drop(Unavailable(_CLOSING))
            self.engine.close()
        except Exception as error:
            log.exception("the engine has failed, and nothing more can be generated")
            self.failure = error
            self._drop(Unavailable(_FAILED))
            self.on_failure()

    def _goes_on(self) -> bool:
        with self._change:
            if not (self._waiting or self._running or self._gone) and self._closes_at is None:
                self._change.wait(_HEARTBEAT_S)
            if self._closes_at is None:
                return True
            return bool(self._waiting or self._running) and not self._is_over

    def _admit(self) -> Job | None:
        """Let jobs join that have room; return a search whose turn has come."""
        with self._change:
            for number in self._gone:
                self.engine.cancel(number)
            self._gone.clear()
            while self._waiting and len(self._running) < self.engine.rows:
                job = self._waiting[0]
                if isinstance(job.asked, Search):
                    if self._running or self.engine.is_busy:
                        return None
                    self._searching = self._waiting.popleft()
                    return self._searching
                self._waiting.popleft()
                try:
                    job.number = self.engine.add(job.asked)
                except ConfigError as error:
                    job.tell(error)
                else:
                    self._running[job.number] = job
        return None

    def _step(self) -> None:
        for event in self.engine.step():
            self.num_tokens += event.choice is not None
            with self._change:
                job = self._running.get(event.number)
                if job and event.reason:
                    del self._running[event.number]
            if job and not job.is_cancelled:
                job.tell(self._no_numbers() if event.reason == "failed" else event)

    def _search(self, job: Job) -> None:
        assert isinstance(job.asked, Search), "only a search is alone"
        told: Told
        try:
            beams = self.engine.search(
                job.asked, goes_on=lambda: not (job.is_cancelled or self._is_over)
            )
        except ConfigError as error:
            told = error
        except MegatronError:
            told = self._no_numbers()
        else:
            told = beams or Unavailable(_CLOSING)
            self.num_tokens += sum(len(beam.tokens) for beam in beams)
        self._searching = None
        if not job.is_cancelled:
            job.tell(told)

    def _no_numbers(self) -> Unavailable:
        return Unavailable(str(self.engine.stage.no_numbers()))

    @property
    def _is_over(self) -> bool:
        """Whether what is under way has no time left."""
        return self._closes_at is not None and time.monotonic() >= self._closes_at

    def _drop(self, reason: Exception) -> None:
        with self._change:
            jobs = [*self._running.values(), *self._waiting]
            if self._searching:
                jobs.append(self._searching)
            self._running.clear()
            self._waiting.clear()
        for job in jobs:
            if not job.is_cancelled:
                job.tell(reason)
