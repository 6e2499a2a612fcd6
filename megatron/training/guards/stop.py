"""Early end or save of a run: kill switch, time limit, signals, save-now file, last iteration."""

import logging
import os.path
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Protocol

from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import ExitCode
from megatron.config.optimization.training import TrainingPlan
from megatron.training.loop.collectives import any_rank

log = logging.getLogger(__name__)

SAVE_FILE = "save-now"
"""Name of the file in --save that requests a checkpoint."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_STAY_IGNORED = (signal.SIGINT, signal.SIGHUP)


class Request(Protocol):
    """A request from outside to end the run. All ranks follow when one rank sees it."""

    @property
    def exit_code(self) -> ExitCode:
        """Exit code of a run that it ends."""

    def is_made(self) -> bool:
        """Whether this rank sees the request."""

    def reason(self) -> str:
        """Return the last line of the log."""


class KillSwitch:
    """Kill switch: while a file exists, the run ends, and none starts. Rank 0 checks it.

    It ends a chain of jobs, so the exit code is not one that resumes.

    Args:
        path: the file.
        looks: whether this is rank 0.
    """

    exit_code = ExitCode.FINISHED

    def __init__(self, path: str, *, looks: bool):
        self._path = Path(path)
        self._looks = looks

    def is_made(self) -> bool:
        """Whether the file exists."""
        # A disk that fails for a moment ends no run.
        return self._looks and os.path.exists(self._path)

    def reason(self) -> str:
        """Return the last line of the log."""
        return f"Detected kill switch at {self._path}. Exiting"


class TimeLimit:
    """Time limit in minutes since the start (--exit-duration-in-mins), by rank 0's clock.

    Args:
        minutes: the limit.
        started_at: time.perf_counter() at the start.
        looks: whether this is rank 0.
    """

    exit_code = ExitCode.RESUMABLE

    def __init__(self, minutes: int, *, started_at: float, looks: bool):
        self._minutes = minutes
        self._started_at = started_at
        self._looks = looks

    def is_made(self) -> bool:
        """Whether the limit is reached."""
        return self._looks and self._minutes_passed() >= self._minutes

    def reason(self) -> str:
        """Return the last line of the log."""
        return f"exiting program after {self._minutes_passed():.1f} minutes"

    def _minutes_passed(self) -> float:
        return (time.perf_counter() - self._started_at) / 60


class Signals:
    """A signal to this process; a second SIGINT (Ctrl-C) ends it at once.

    A second SIGTERM does not: launchers send several for one stop. A SIGINT or SIGHUP that is
    ignored stays so: shells start background jobs like that, which the Ctrl-C for another job must not
    end, and nohup programs that continue when their terminal is closed.
    """

    exit_code = ExitCode.RESUMABLE

    def __init__(self) -> None:
        self._received: str | None = None
        for number in _SIGNALS:
            if number not in _STAY_IGNORED or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._receive)

    def is_made(self) -> bool:
        """Whether a signal was received."""
        return self._received is not None

    def reason(self) -> str:
        """Return the last line of the log."""
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
    """The launcher of a rank has died.

    Args:
        is_lost: whether this rank's has.
    """

    exit_code = ExitCode.RESUMABLE

    def __init__(self, is_lost: Callable[[], bool]):
        self._is_lost = is_lost

    def is_made(self) -> bool:
        """Whether this rank's launcher has ended."""
        return self._is_lost()

    def reason(self) -> str:
        """Return the last line of the log."""
        return "exiting program because a launcher has ended"


class SaveFile:
    """A file that requests a checkpoint, after which training continues. Rank 0 checks it.

    Args:
        directory: its folder.
        looks: whether this is rank 0.
    """

    def __init__(self, directory: str, *, looks: bool):
        self._path = Path(directory) / SAVE_FILE
        self._looks = looks

    def is_made(self) -> bool:
        """Whether the file exists."""
        return self._looks and os.path.exists(self._path)

    def remove(self) -> None:
        """Remove the file; if that fails, do not look again."""
        if not self._looks:
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be removed (%s): it is ignored from here on", self._path, error)
            self._looks = False


class Requests:
    """All requests from outside, in the same order on every rank.

    Args:
        ends: requests to end the run.
        save: requests a checkpoint.
        ignore: ignores signals from then on, so that none changes the exit code.
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
        """Return the first request to end that any rank sees, and whether to save.

        Communication: one all-reduce of a byte per request over all ranks, when there are any.
        """
        seen = [request.is_made() for request in self.ends]
        if self.save:
            seen.append(self.save.is_made())
        if not seen:
            return None, False
        made = any_rank(seen)
        pending = (request for request, yes in zip(self.ends, made, strict=False) if yes)
        return next(pending, None), self.save is not None and made[-1]


def build_requests(
    plan: TrainingPlan,
    *,
    save: str,
    rank: int,
    started_at: float,
    is_launcher_lost: Callable[[], bool] = lambda: False,
) -> Requests:
    """Build the requests that the plan allows.

    Args:
        save: directory of checkpoints; empty for none.
        started_at: time.perf_counter() at the start.
        is_launcher_lost: whether this rank's launcher has died.
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


class Stop:
    """Decide before each step whether the run ends, and why.

    Args:
        requests: requests from outside; all ranks follow when one rank sees one.
        save: saves on request; returns whether the state is saved.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        *,
        started_from: int,
        requests: Requests | None = None,
        save: Callable[[TrainState], bool] | None = None,
    ):
        self._plan = plan
        self._started_from = started_from
        self._requests = requests or Requests()
        self._save = save
        self.exit_code = ExitCode.FINISHED

    def __call__(self, state: TrainState) -> str | None:
        """Return the reason if the run ends before its next step, else None.

        Communication: one all-reduce of a few bytes over all ranks when there are requests.
        """
        if self.is_done(state):
            return f"training is done after {state.iteration} iterations"
        request, saves = self._requests.agree()
        # Before the first step there is nothing to save, and a state with a NaN loss is not saved;
        # the file stays.
        if saves and self._save and self._requests.save and state.iteration and self._save(state):
            self._requests.save.remove()
        if request:
            self.exit_code = request.exit_code
            return request.reason()
        interval = self._plan.exit_interval
        # A multiple may lie among iterations that are skipped.
        if interval and state.iteration // interval > self._started_from // interval:
            return f"exiting program at iteration {state.iteration}"
        return None

    def is_done(self, state: TrainState) -> bool:
        """Whether --train-iters, --train-samples or --train-tokens are reached."""
        plan = self._plan
        return state.iteration >= plan.train_iters or 0 < plan.train_tokens <= state.tokens
