"""Automatic restarts after a failure (--max-restarts), through torch's launcher."""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megatron.common.errors import ConfigError, ExitCode, RepeatedFailureError
from megatron.config.optimization.training import TrainingConfig
from megatron.training.process.environment import Launcher, export_restarts, read_launch
from megatron.training.process.failure import failures_of


def start_through_launcher(
    training: TrainingConfig, argv: Sequence[str], launcher: Launcher
) -> None:
    """Become torch's launcher of this very command if --max-restarts needs one.

    Returns under a launcher, or without --max-restarts; otherwise this process is replaced.

    Raises:
        ConfigError: the launcher above starts nothing again, or so many times not.
    """
    limit = training.max_restarts
    if limit < 1 or (launcher.name == "torch" and launcher.max_restarts == limit):
        return
    if launcher.name == "torch":
        raise ConfigError(
            f"--max-restarts {limit}, but the launcher has {launcher.max_restarts}: write it "
            "before the script, for the launcher"
        )
    if launcher.name or read_launch(None).world_size > 1:
        raise ConfigError(
            f"--max-restarts {limit}: what started this process starts nothing again; start it "
            "by `python -m torch.distributed.run --max-restarts N` or by python alone"
        )
    _become_launcher(limit, argv)


def _become_launcher(restarts: int, argv: Sequence[str]) -> NoReturn:
    export_restarts()
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    words += ["--max-restarts", str(restarts), sys.argv[0], *argv]
    os.execv(sys.executable, words)


def refuse_repeated_failure(save: str, launcher: Launcher) -> None:
    """Refuse another attempt when the last two have failed alike at the same step.

    Raises:
        RepeatedFailureError: they have.
    """
    if launcher.restarts < 2:
        return
    last = failures_of(Path(save))[-2:] if save else []
    if len(last) == 2 and last[0].signature == last[1].signature:
        raise RepeatedFailureError(
            f"the last two attempts failed in the same way at step {last[1].iteration} "
            f"({last[1].message}): no other is started"
        )


def code_for(code: int, launcher: Launcher) -> int:
    """Return the exit code for the launcher: 0 in place of `RESUMABLE`, so that it does not restart.

    A launcher that may restart would do so after a stop on request, too.
    """
    if code == ExitCode.RESUMABLE and launcher.max_restarts:
        return ExitCode.FINISHED
    return code


def end_launcher(launcher: Launcher) -> None:
    """End a launcher, so that it does not restart a run that would fail again."""
    if launcher.max_restarts:
        os.kill(os.getppid(), signal.SIGTERM)
