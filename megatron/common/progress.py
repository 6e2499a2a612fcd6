"""Progress of work that may take long: a bar on a terminal, a line every ten seconds elsewhere."""

import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from tqdm import tqdm

log = logging.getLogger(__name__)

EVERY_S = 10.0
"""Seconds between two lines where stderr is no terminal."""


T = TypeVar("T")


class Progress:
    """Counts what is done of a total, and shows it with the time that is left. Threads may share it.

    Args:
        title: what is done, as "download of model.bin".
        unit: such as "B" for bytes, which are shown as MB and GB, or "tensors".
    """

    def __init__(self, title: str, total: int, unit: str):
        self._title, self._total, self._unit = title, total, unit
        self._done, self._lock = 0, threading.Lock()
        self._started_at = self._shown_at = time.monotonic()
        self._bar = _terminal_bar(title, total, unit)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, count: int = 1) -> None:
        """Count what was done since the last call."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            if self._bar is not None:
                self._bar.update(count)
            elif now - self._shown_at >= EVERY_S:
                self._shown_at = now
                log.info(self._line(now - self._started_at))

    def _line(self, elapsed_s: float) -> str:
        left_s = elapsed_s / self._done * (self._total - self._done) if self._done else 0.0
        scale, unit = (1e-6, "MB") if self._unit == "B" else (1, self._unit)
        share = self._done / self._total if self._total else 1.0
        return (
            f"{self._title}: {self._done * scale:.0f} of {self._total * scale:.0f} {unit} | "
            f"done: {share:.1%} | left: {left_s:.0f} s"
        )


def with_progress(items: Iterable[T], title: str, total: int, unit: str) -> Iterator[T]:
    """Yield `items`, of which there are `total`, and show how many are done."""
    with Progress(title, total, unit) as progress:
        for item in items:
            yield item
            progress.add()


def _terminal_bar(title: str, total: int, unit: str) -> "tqdm[Any] | None":
    """Return a bar that work of less than a second does not show; None without a terminal.

    None too where tqdm is switched off (TQDM_DISABLE).
    """
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    from tqdm import tqdm

    bar = tqdm(desc=title, total=total, unit=unit, unit_scale=unit == "B", leave=False, delay=1)
    return None if bar.disable else bar
