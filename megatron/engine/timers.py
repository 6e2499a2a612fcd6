"""How long the parts of a step take."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_COARSE = ("batch-generator", "forward-compute", "backward-compute", "optimizer")
"""The parts that level 1 measures; level 2 measures all."""


class Timers:
    """Adds up the seconds of each part since they were last taken.

    Args:
        level: 0 measures nothing, 1 the large parts, 2 all.
        nvtx: whether NVIDIA's tools are told where a part begins and ends.
        synchronise: waits for the device, so that its work counts where it was asked for.
    """

    def __init__(
        self, level: int = 0, *, nvtx: bool = False, synchronise: Callable[[], None] | None = None
    ):
        self._level = level
        self._nvtx = nvtx
        self._synchronise = synchronise or (lambda: None)
        self._seconds: dict[str, float] = {}

    @property
    def is_on(self) -> bool:
        """Whether any part is measured or marked."""
        return self._level > 0 or self._nvtx

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what is done inside as the part `name`."""
        measured = self._level > 1 or (self._level == 1 and name in _COARSE)
        if self._nvtx:
            torch.cuda.nvtx.range_push(name)
        started_at = self._now() if measured else 0.0
        try:
            yield
        finally:
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
