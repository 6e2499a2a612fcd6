"""Who may ask a run to end or to save: files, the clock, the operating system."""

import logging
import os.path
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Protocol

from megatron.common.errors import ExitCode
from megatron.config.optimization.training import TrainingPlan
from megatron.training.loop.collectives import agreed

log = logging.getLogger(__name__)

SAVE_FILE = "save-now"
"""Name of the file in --save that asks for a checkpoint."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Request(Protocol):
    """A wish from outside that the run ends. All ranks follow when one of them sees it."""

    @property
    def exit_code(self) -> ExitCode:
        """What a run says that has followed it before its end."""

    def is_made(self) -> bool:
        """Whether this rank sees the wish."""

    def reason(self) -> str:
        """Return what is told at the end."""


class KillSwitch:
    """A file: while it is there, the run ends, and none starts. Rank 0 looks.

    It ends a whole chain of jobs, so nobody is asked to start the command again.

    Args:
        path: the file.
        looks: whether this is rank 0.
    """

    exit_code = ExitCode.FINISHED

    def __init__(self, path: str, *, looks: bool):
        self._path = Path(path)
        self._looks = looks

    def is_made(self) -> bool:
        """Whether the file is there."""
        # A disk that does not answer for a moment is asked again, and ends no run.
        return self._looks and os.path.exists(self._path)

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

    exit_code = ExitCode.RESUMABLE

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
    """A signal to this process; a second SIGINT (Ctrl-C) ends it at once.

    A second SIGTERM does not: launchers send several for one wish. A SIGINT that is ignored stays
    so: shells start background jobs like that, which the Ctrl-C for another job must not end.
    """

    exit_code = ExitCode.RESUMABLE

    def __init__(self) -> None:
        self._received: str | None = None
        for number in _SIGNALS:
            if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._receive)

    def is_made(self) -> bool:
        """Whether a signal came."""
        return self._received is not None

    def reason(self) -> str:
        """Return what is told at the end."""
        return f"exiting program after receiving {self._received or 'a signal on another rank'}"

    def ignore(self) -> None:
        """Ignore these signals from now on, for a run that has saved and is leaving."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._received == signal.SIGINT.name:
            raise KeyboardInterrupt
        self._received = signal.Signals(number).name


class LostLauncher:
    """The launcher of a rank has ended without a word.

    Args:
        is_lost: whether that is so on this rank.
    """

    exit_code = ExitCode.RESUMABLE

    def __init__(self, is_lost: Callable[[], bool]):
        self._is_lost = is_lost

    def is_made(self) -> bool:
        """Whether this rank's launcher has ended."""
        return self._is_lost()

    def reason(self) -> str:
        """Return what is told at the end."""
        return "exiting program because a launcher has ended"


class SaveFile:
    """A file that asks for a checkpoint, after which the run goes on. Rank 0 looks.

    Args:
        directory: where it may appear.
        looks: whether this is rank 0.
    """

    def __init__(self, directory: str, *, looks: bool):
        self._path = Path(directory) / SAVE_FILE
        self._looks = looks

    def is_made(self) -> bool:
        """Whether the file is there."""
        return self._looks and os.path.exists(self._path)

    def done(self) -> None:
        """Remove the file; where that is not allowed, do not look again."""
        if not self._looks:
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be removed (%s): it asks for nothing more", self._path, error)
            self._looks = False


class Requests:
    """All that may be asked of a run from outside, the same list on every rank.

    Args:
        ends: what may ask for the end.
        save: what may ask for a checkpoint.
        ignore: has signals ignored from then on, so that none changes the exit code.
    """

    def __init__(
        self,
        ends: Sequence[Request] = (),
        *,
        save: SaveFile | None = None,
        ignore: Callable[[], None] = lambda: None,
    ):
        self.ends = list(ends)
        self.save = save
        self.ignore = ignore

    def agree(self) -> tuple[Request | None, bool]:
        """Return the first wish to end that any rank sees, and whether to save.

        Communication: one all-reduce of a byte per request over all ranks, when there are any.
        """
        seen = [request.is_made() for request in self.ends]
        if self.save:
            seen.append(self.save.is_made())
        if not seen:
            return None, False
        made = agreed(seen)
        wishes = (request for request, yes in zip(self.ends, made, strict=False) if yes)
        return next(wishes, None), self.save is not None and made[-1]


def build_requests(
    plan: TrainingPlan,
    *,
    save: str,
    rank: int,
    started_at: float,
    is_launcher_lost: Callable[[], bool] = lambda: False,
) -> Requests:
    """Return what the plan lets ask.

    Args:
        save: directory of checkpoints; empty for none.
        started_at: time.perf_counter() at the start.
        is_launcher_lost: whether this rank's launcher has ended.
    """
    ends: list[Request] = []
    ignore: Callable[[], None] = lambda: None  # noqa: E731
    if plan.kill_switch:
        ends.append(KillSwitch(plan.kill_switch, looks=rank == 0))
    if plan.exits_on_signal:
        signals = Signals()
        ends += [signals, LostLauncher(is_launcher_lost)]
        ignore = signals.ignore
    if plan.exit_after_minutes:
        ends.append(TimeLimit(plan.exit_after_minutes, started_at=started_at, looks=rank == 0))
    return Requests(ends, save=SaveFile(save, looks=rank == 0) if save else None, ignore=ignore)
