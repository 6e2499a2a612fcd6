"""Timers of the parts of a step: forward, backward, optimizer, communication; NVTX ranges."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

DATA, FORWARD = "batch-generator", "forward-compute"
"""The parts that come before a step's first meeting of the replicas."""

_COARSE = (DATA, FORWARD, "backward-compute", "optimizer")
"""The parts that level 1 measures; level 2 measures all."""


class HostEvent:
    """A point in this process's time, as torch.cuda.Event is one in a stream's."""

    def record(self) -> None:
        """Take the time."""
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        """Return at once: it is past."""

    def elapsed_time(self, later: "HostEvent") -> float:
        """Return the milliseconds until `later`."""
        return 1000 * (later._at - self._at)


class Pace:
    """Add up the time of each rank's own work in a step, to find slow ranks.

    Nothing waits for the device inside a step: on a GPU events are put into the stream and read
    when the step is over.

    Args:
        device_event: makes an event of the stream that computes.
    """

    def __init__(self, device_event: Callable[[], Any] = HostEvent):
        self._events: dict[str, Callable[[], Any]] = {DATA: HostEvent, FORWARD: device_event}
        self._open: list[tuple[str, Any, Any]] = []

    def begin(self, part: str) -> Callable[[], None]:
        """Start the timer of a part; return a function that stops it."""
        if part not in self._events:
            return lambda: None
        start, end = self._events[part](), self._events[part]()
        start.record()
        self._open.append((part, start, end))
        return lambda: end.record()

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call, and begin anew."""
        taken = dict.fromkeys(self._events, 0.0)
        for part, start, end in self._open:
            end.synchronize()
            taken[part] += start.elapsed_time(end) / 1000
        self._open = []
        return taken


class Timers:
    """Add up the seconds of each part of a step since they were last read.

    Args:
        level: 0 measures nothing, 1 the large parts, 2 all.
        nvtx: whether each part is an NVTX range.
        synchronise: waits for the device, so that asynchronous work counts in its part.
        pace: measures each part too, at any level.
    """

    def __init__(
        self,
        level: int = 0,
        *,
        nvtx: bool = False,
        synchronise: Callable[[], None] | None = None,
        pace: Pace | None = None,
    ):
        self.pace = pace
        self._paused = False
        self._level = level
        self._nvtx = nvtx
        self._synchronise = synchronise or (lambda: None)
        self._seconds: dict[str, float] = {}

    @property
    def is_on(self) -> bool:
        """Whether any part is measured or marked."""
        return self._level > 0 or self._nvtx or self.pace is not None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Count nothing of what is done inside."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what is done inside as the part `name`."""
        if self._paused:
            yield
            return
        measured = self._level > 1 or (self._level == 1 and name in _COARSE)
        if self._nvtx:
            torch.cuda.nvtx.range_push(name)
        started_at = self._now() if measured else 0.0
        end = self.pace.begin(name) if self.pace else None
        try:
            yield
        finally:
            if end:
                end()
            if measured:
                spent = self._now() - started_at
                self._seconds[name] = self._seconds.get(name, 0.0) + spent
            if self._nvtx:
                torch.cuda.nvtx.range_pop()

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call, and begin anew."""
        taken, self._seconds = self._seconds, {}
        return taken

    def _now(self) -> float:
        self._synchronise()
        return time.perf_counter()
