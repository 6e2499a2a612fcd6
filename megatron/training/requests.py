"""Who may ask a run to end: a file, the clock, the operating system."""

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Protocol

from megatron.plan.training_plan import TrainingPlan
from megatron.training.agree import agreed

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Request(Protocol):
    """A wish from outside that the run ends. All ranks follow when one of them sees it."""

    def is_made(self) -> bool:
        """Whether this rank sees the wish."""

    def reason(self) -> str:
        """Return what is told at the end."""


class KillSwitch:
    """A file: while it is there, the run ends, and none starts. Rank 0 looks.

    Args:
        path: the file.
        looks: whether this is rank 0.
    """

    def __init__(self, path: str, *, looks: bool):
        self._path = Path(path)
        self._looks = looks

    def is_made(self) -> bool:
        """Whether the file is there."""
        return self._looks and self._path.exists()

    def reason(self) -> str:
        """Return what is told at the end."""
        return f"Detected kill switch at {self._path}. Exiting"


class TimeLimit:
    """A number of minutes since the start. Rank 0's clock decides.

    Args:
        minutes: how many.
        started_at: time.perf_counter() at the start.
        looks: whether this is rank 0.
    """

    def __init__(self, minutes: int, *, started_at: float, looks: bool):
        self._minutes = minutes
        self._started_at = started_at
        self._looks = looks

    def is_made(self) -> bool:
        """Whether the time is over."""
        return self._looks and self._passed() >= self._minutes

    def reason(self) -> str:
        """Return what is told at the end."""
        return f"exiting program after {self._passed():.1f} minutes"

    def _passed(self) -> float:
        return (time.perf_counter() - self._started_at) / 60


class Signals:
    """A signal to this process; a second one has its usual effect, which ends it at once."""

    def __init__(self) -> None:
        self._received: str | None = None
        self._usual = {number: signal.signal(number, self._receive) for number in _SIGNALS}

    def is_made(self) -> bool:
        """Whether a signal came."""
        return self._received is not None

    def reason(self) -> str:
        """Return what is told at the end."""
        return f"exiting program after receiving {self._received or 'a signal on another rank'}"

    def restore(self) -> None:
        """Give the signals their usual effect."""
        for number, usual in self._usual.items():
            signal.signal(number, usual)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = signal.Signals(number).name
        self.restore()


def first_reason(requests: Sequence[Request]) -> str | None:
    """Return the reason of the first wish that any rank sees, the same on every rank.

    Communication: one all-reduce of a byte per request over all ranks, when there are any.
    """
    if not requests:
        return None
    made = agreed([request.is_made() for request in requests])
    reasons = (request.reason() for request, yes in zip(requests, made, strict=True) if yes)
    return next(reasons, None)


def build_requests(plan: TrainingPlan, *, rank: int, started_at: float) -> list[Request]:
    """Return what the plan lets ask for the end, the same list on every rank."""
    requests: list[Request] = []
    if plan.kill_switch:
        requests.append(KillSwitch(plan.kill_switch, looks=rank == 0))
    if plan.exits_on_signal:
        requests.append(Signals())
    if plan.exit_after_minutes:
        requests.append(TimeLimit(plan.exit_after_minutes, started_at=started_at, looks=rank == 0))
    return requests
