"""Jobs of two ranks that meet as a user's do, and of which one does not get to the first step."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked import without_head_start
from forks import become_own_process, exit_codes
from ports import free_port

TIMEOUT_S = 400.0

Setup = Callable[[int, str], None]
"""What a rank does to itself before it starts, given its number and --save."""


@dataclass(frozen=True)
class Start:
    """A job: its command line but for --save, where that is, and what its ranks do before."""

    argv: Sequence[str]
    save: Path
    setup: Setup
    address: str = "127.0.0.1"
    port: int = 0
    ranks: int = 2


@dataclass(frozen=True)
class Ended:
    """The exit code of each rank, None of one that had to be killed, and its output."""

    codes: list[int | None]
    outputs: list[str]


def run_together(starts: Sequence[Start]) -> list[Ended]:
    """Run jobs side by side, as most of their time is spent waiting."""
    calls, files = [], []
    for start in starts:
        port = start.port or free_port()
        start.save.mkdir(parents=True, exist_ok=True)
        files.append([start.save.parent / f"{start.save.name}-{r}" for r in range(start.ranks)])
        calls += [(start, port, rank, file) for rank, file in enumerate(files[-1])]
    codes = exit_codes(_rank, calls, timeout_s=TIMEOUT_S)
    ended = []
    for own in files:
        texts = [file.read_text(errors="replace") if file.exists() else "" for file in own]
        ended.append(Ended(codes[: len(own)], texts))
        del codes[: len(own)]
    return ended


def in_place_of(
    moment: str, does: Callable[[str], None], struck: int, rank: int, save: str
) -> None:
    """Have the rank `struck` do something where it would do `moment`, which is MODULE:FUNCTION."""
    from importlib import import_module

    from megatron.training.process import watchdog

    without_head_start(rank)
    watchdog.START_S = 0.0
    if rank != struck:
        return
    name, _, function = moment.partition(":")
    owner = import_module(name)
    usual = getattr(owner, function)

    def instead(*words: Any, **named: Any) -> Any:
        does(save)
        return usual(*words, **named)

    setattr(owner, function, instead)


def die_in_place_of(moment: str, struck: int, rank: int, save: str) -> None:
    """Have the rank `struck` be killed where it would do `moment`, and the others follow it soon."""
    from megatron.training.process.watchdog import Watchdog

    _set_default(Watchdog.__init__, "peer_grace_s", 3.0)
    in_place_of(moment, _die, struck, rank, save)


def sleep(save: str) -> None:
    """Do not come back."""
    threading.Event().wait()


def stop(save: str) -> None:
    """Stay stopped until the others have reported why they left, and then do not come back.

    Else this thread may meet the closed connections before the watchdog has written its stacks.
    """
    if not os.fork():
        cause = Path(save) / "failure.json"
        give_up_at = time.monotonic() + TIMEOUT_S
        while not cause.exists() and time.monotonic() < give_up_at:
            time.sleep(0.2)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    sleep(save)


def _die(save: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def nothing(rank: int, save: str) -> None:
    """Start as usual, without waiting for a launcher, or long for an answer."""
    from megatron.tensor_parallel import rendezvous as meeting

    without_head_start(rank)
    _set_default(meeting.rendezvous, "patience", meeting.Patience(answer_s=5.0))


def _set_default(function: Any, name: str, value: Any) -> None:
    assert name in function.__kwdefaults__
    function.__kwdefaults__[name] = value


def _rank(start: Start, port: int, rank: int, output: Path) -> None:
    become_own_process(
        {
            **os.environ,
            **{"RANK": str(rank), "LOCAL_RANK": str(rank)},
            **{"WORLD_SIZE": str(start.ranks), "LOCAL_WORLD_SIZE": str(start.ranks)},
            **{"MASTER_ADDR": start.address, "MASTER_PORT": str(port)},
        }
    )
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    from megatron.training.entry import train_from
    from megatron.training.process.launch import run_rank

    start.setup(rank, str(start.save))
    argv = [*start.argv, "--save", str(start.save), "--load", str(start.save)]
    run_rank(lambda words: train_from(words, "gpt", description=""), argv)
