"""Lock of a checkpoint directory: one run at a time writes to it; locks of dead processes are taken over."""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

import psutil

from megatron.checkpointing.manifest import LOCK
from megatron.common.atomic_files import NotRegularError, open_regular
from megatron.common.errors import BusyError, CheckpointError, WrongCheckpointError, reason
from megatron.common.process_identity import is_running, pid_namespace, start_of

log = logging.getLogger(__name__)

BEAT_S = 10.0
SILENCE_S = 60.0
"""Interval between heartbeats of a lock's owner, and the silence after which it counts as dead."""


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock."""

    host: str
    pid: int
    started: str  # distinguishes it from a later process with the same pid
    numbers: str  # see `pid_namespace`
    since: str  # local time, for messages


@contextmanager
def hold_lock(
    directory: Path, *, beat_s: float = BEAT_S, silence_s: float = SILENCE_S
) -> Iterator[None]:
    """Hold the lock of `directory` inside the `with` block.

    The lock of a dead owner is taken over with a log line. An owner in this host and PID namespace
    is looked up at once; any other is dead if it does not touch its lock for `silence_s`, which
    this call waits for. Clocks of different hosts are never compared.

    Raises:
        CheckpointError: another run writes there.
        WrongCheckpointError: the directory cannot be written to.
    """
    file = directory / LOCK
    try:
        directory.mkdir(parents=True, exist_ok=True)
        me = _take(file, silence_s)
    except OSError as error:
        raise WrongCheckpointError(f"--save {directory}: {reason(error, directory)}") from error
    ended = threading.Event()
    threading.Thread(target=_beat, args=(file, me, ended, beat_s), daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        if _owner_in(file) == me:
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                log.warning("the lock of this run cannot be removed: %s", error)


def _take(file: Path, silence_s: float) -> Owner:
    me = _this_process()
    while True:
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            _require_dead(file, silence_s)
            continue
        with open(descriptor, "w", encoding="utf-8") as stream:
            json.dump(asdict(me), stream)
        return me


def _require_dead(file: Path, silence_s: float) -> None:
    """Remove the lock of a dead owner.

    Raises:
        BusyError: the owner is alive.
    """
    owner = _owner_in(file)
    if owner is None or owner.numbers != pid_namespace():
        log.info(
            "%s belongs to another run (%s): waiting to see whether it is alive",
            file,
            _describe(owner),
        )
        is_alive = _is_touched(file, silence_s)
    else:
        is_alive = is_running(owner.pid, owner.started)
    if is_alive:
        stopped = ""
        if owner and is_running(owner.pid, owner.started) and _is_stopped(owner.pid):
            stopped = f", and that process is stopped (kill -CONT {owner.pid} resumes it)"
        raise BusyError(
            f"--save {file.parent}: another run writes there ({_describe(owner)}){stopped}; end it, or "
            f"give another directory (the lock is {file})"
        )
    # Renamed first: if two runs find it at the same time, only one gets it.
    away = file.with_name(f"{file.name}.{socket.gethostname()}.{os.getpid()}")
    with suppress(FileNotFoundError):
        os.rename(file, away)
        if _owner_in(away) != owner:
            # Another run was faster: this is its lock.
            os.rename(away, file)
            return
        away.unlink()
        log.warning("%s was left by a run that has ended (%s): taken over", file, _describe(owner))


def require_not_taken(directory: Path) -> None:
    """Refuse to write to `directory` when another process has taken over its lock.

    This happens after the process or its machine was suspended for longer than the silence allowed.

    Raises:
        CheckpointError: another process holds the lock.
    """
    owner = _owner_in(directory / LOCK)
    if owner and owner != replace(_this_process(), since=owner.since):
        raise BusyError(
            f"--save {directory}: another run writes there now ({_describe(owner)}): it took over the "
            "lock of this one, which gave no heartbeat; this run writes nothing more: leave the directory to the other"
        )


def require_kept(directory: Path) -> None:
    """Refuse to write to a directory that has lost the lock which this run took there.

    Raises:
        CheckpointError: it was removed, renamed or emptied meanwhile, or its disk is gone.
    """
    if not (directory / LOCK).exists():
        raise CheckpointError(
            f"--save {directory} has lost the {LOCK} of this run: the directory was "
            "removed, renamed, emptied or unmounted meanwhile; nothing more is written there: "
            "put it back, and start the same command again"
        )


def dead_owner(directory: Path) -> str:
    """Describe the dead process that left its lock in `directory`; "" if there is none.

    Also "" for an owner on another host or in another container, which may be alive.
    """
    owner = _owner_in(directory / LOCK)
    if owner is None or not owner.started or owner.numbers != pid_namespace():
        return ""
    return "" if is_running(owner.pid, owner.started) else _describe(owner)


def owner_of(directory: Path) -> Owner | None:
    """Return the process that holds the lock of `directory`; None if none does, or it is unreadable."""
    return _owner_in(directory / LOCK)


def _describe(owner: Owner | None) -> str:
    if owner is None:
        return "owner unreadable"
    return f"process {owner.pid} on {owner.host}, since {owner.since}"


def _owner_in(file: Path) -> Owner | None:
    try:
        with open_regular(file) as stream:
            return Owner(**json.loads(stream.read()))
    except (OSError, ValueError, TypeError):
        return None


def _is_touched(file: Path, silence_s: float) -> bool:
    """Whether the owner touches `file` within `silence_s`; False as soon as the file is gone."""
    first = _modified_ns(file)
    until = time.monotonic() + silence_s
    while time.monotonic() < until:
        time.sleep(min(1.0, silence_s / 10))
        if (now := _modified_ns(file)) != first:
            return now is not None
    return False


def _modified_ns(file: Path) -> int | None:
    try:
        # Opening makes a network file system refresh its attributes.
        with open_regular(file) as stream:
            return os.fstat(stream.fileno()).st_mtime_ns
    except NotRegularError:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _beat(file: Path, me: Owner, ended: threading.Event, beat_s: float) -> None:
    while not ended.wait(beat_s) and _owner_in(file) in (me, None):
        # The next heartbeat may succeed; a failed one does not end the run.
        with suppress(OSError):
            os.utime(file)


def _this_process() -> Owner:
    since = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
    started = start_of(os.getpid()) or ""
    return Owner(socket.gethostname(), os.getpid(), started, pid_namespace(), since)


def _is_stopped(pid: int) -> bool:
    """Whether the process is stopped, by SIGSTOP or Ctrl-Z."""
    with suppress(psutil.Error):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False
