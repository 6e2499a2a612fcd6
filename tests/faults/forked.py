"""Whole training jobs that cost a fork each, and are killed at a chosen event of their files.

Each rank is a fork that does what the entry script does. What a rank does to the files of its
--save is counted as it happens, so that a job can be killed at any event of it: SIGKILL, as by an
operator or by the kernel, not an exception.
"""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from forks import server

TIMEOUT_S = 600
_WATCHED = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}

FLUSH = "fsync"

Setup = Callable[[int], None]
"""What a rank does to itself before it starts, given its number."""


@dataclass(frozen=True)
class Killed:
    """Which event of which rank is its last.

    Args:
        event: its number, counted from 0; the rank is killed before it takes place.
        torn: whether only half of the file had been written, where the event is to flush one.
        only: count none but the events of these words, where threads change the order.
    """

    event: int
    rank: int = 0
    torn: bool = False
    only: str = ""


@dataclass(frozen=True)
class Strike:
    """A signal that a rank gets at a time of its life, whatever it does then."""

    after_s: float
    rank: int
    number: int


@dataclass(frozen=True)
class Ended:
    """A job that has ended: of each rank its exit code, its output, and its changes of files."""

    codes: list[int]
    outputs: list[str]
    events: list[list[str]]

    def succeeded(self) -> "Ended":
        assert set(self.codes) == {0}, "\n".join(self.outputs)
        return self


def run_job(
    argv: Sequence[str],
    save: Path,
    *,
    ranks: int = 1,
    killed: Killed | None = None,
    setup: Setup | None = None,
    strikes: Sequence[Strike] = (),
    timeout_s: float = TIMEOUT_S,
    grace_s: float | None = None,
) -> Ended:
    """Train what `argv` says in `ranks` processes; wait for all of them.

    Args:
        save: the directory whose files are watched.
        setup: a function of a module, called on every rank before it starts.
        grace_s: how long after a rank has failed the others are killed, as launchers do; None to
            wait for them.

    Raises:
        TimeoutError: a rank has not ended after `timeout_s`.
    """
    context = server()
    folder = save.parent / f".{save.name}-{os.urandom(4).hex()}"
    folder.mkdir(parents=True)
    processes = [
        context.Process(
            target=_rank, args=(list(argv), save, folder, rank, ranks, killed, setup), daemon=True
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for strike in strikes:
        strikes_then = threading.Timer(strike.after_s, _strike, (processes, strike))
        strikes_then.daemon = True
        strikes_then.start()
    try:
        if not _all_end(processes, timeout_s, grace_s):
            raise TimeoutError(f"no end after {timeout_s} s:\n{_text(folder, 'output', ranks)}")
    finally:
        for process in processes:
            process.kill()
            process.join()
    return Ended(
        [process.exitcode for process in processes],
        _text(folder, "output", ranks),
        [text.splitlines() for text in _text(folder, "events", ranks)],
    )


def _all_end(processes: Sequence[Any], timeout_s: float, grace_s: float | None) -> bool:
    """Wait until all have ended; return whether they have, or were killed after the first failure."""
    give_up_at = time.monotonic() + timeout_s
    kill_at: float | None = None
    while going := [process for process in processes if process.exitcode is None]:
        now = time.monotonic()
        if now > give_up_at:
            return False
        has_failed = any(process.exitcode for process in processes)
        if grace_s is not None and has_failed and kill_at is None:
            kill_at = now + grace_s
        if kill_at is not None and now >= kill_at:
            for process in going:
                process.kill()
        until = min(give_up_at, kill_at or give_up_at)
        wait([process.sentinel for process in going], max(0.05, until - now))
    return True


def _strike(processes: Sequence[Any], strike: Strike) -> None:
    with suppress(ProcessLookupError):
        os.kill(processes[strike.rank].pid, strike.number)


def steps(save: Path) -> list[dict[str, Any]]:
    """Return what the journal says of each step that counts, without what the clock says."""
    from megatron.training.loop.journal import read_journal

    kept = ("iteration", "first_sample", "samples", "tokens", "lm_loss", "grad_norm", "skipped")
    return [
        {name: record[name] for name in (*kept, "learning_rate")}
        for record in read_journal(save)
        if record["event"] == "step"
    ]


def hashes(save: Path, iteration: int) -> dict[str, str]:
    """Return the hash of each file of a checkpoint, by name, as its manifest tells it."""
    content = json.loads((save / f"global_step{iteration}" / "manifest.json").read_text())
    return {record["name"]: record["hash"] for record in content["files"]}


def without_head_start(rank: int) -> None:
    """Do not wait for a launcher, which there is none of, to end what another rank has left."""
    from megatron.training.process import launch

    launch._HEAD_START_S = 0.1


def without_numbers(event: str) -> str:
    """Return the kind of an event: the same for each iteration and process."""
    return re.sub(r"\d+", "N", event)


def _text(folder: Path, name: str, ranks: int) -> list[str]:
    files = [folder / f"{name}{rank}" for rank in range(ranks)]
    # A rank may be killed before it has made its file.
    return [file.read_text(errors="replace") if file.exists() else "" for file in files]


class _Events:
    """Counts what happens to the files in a directory, and kills this process at one event."""

    def __init__(self, directory: Path, record: Path, killed: Killed | None):
        self._directory = str(directory)
        self._record = os.open(record, os.O_WRONLY | os.O_CREAT, 0o600)
        self._killed = killed
        self._count = 0

    def audit(self, event: str, words: tuple[Any, ...]) -> None:
        """See what Python is about to do; what it does to files it tells its auditors."""
        if event not in _WATCHED or isinstance(words[0], int):
            return
        path = os.fsdecode(words[0])
        if event == "open":
            event = "write" if words[2] & (os.O_WRONLY | os.O_RDWR) else "read"
        # Names inside a folder that is being removed are relative to it.
        if path.startswith(self._directory) or not os.path.isabs(path):
            to = f" to {self._inside(os.fsdecode(words[1]))}" if event == "os.rename" else ""
            self.happen(f"{event} {self._inside(path)}{to}")

    def _inside(self, path: str) -> str:
        return path.removeprefix(self._directory).lstrip("/")

    def fsync(self, descriptor: int) -> None:
        """Flush a file, or die before."""
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.startswith(self._directory):
            self.happen(f"{FLUSH} {self._inside(path)}", path)
        _fsync(descriptor)

    def happen(self, event: str, torn_path: str = "") -> None:
        """Count an event, or die before it takes place."""
        if self._killed and self._killed.only in ("", event):
            if self._killed.event == self._count:
                if self._killed.torn:
                    self._killed = None
                    os.truncate(torn_path, os.path.getsize(torn_path) // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            self._count += 1
        os.write(self._record, f"{event}\n".encode())


_fsync = os.fsync


def _rank(
    argv: list[str],
    save: Path,
    folder: Path,
    rank: int,
    ranks: int,
    killed: Killed | None,
    setup: Setup | None,
) -> None:
    import torch
    import torch.distributed as dist

    from megatron.training.entry import train_from
    from megatron.training.process.launch import run_rank

    output = os.open(folder / f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(number) for name, number in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    if setup:
        setup(rank)
    mine = killed if killed and killed.rank == rank else None
    events = _Events(save, folder / f"events{rank}", mine)
    os.fsync = events.fsync
    sys.addaudithook(events.audit)
    run_rank(lambda words: train_from(words, "gpt", description=""), argv)
