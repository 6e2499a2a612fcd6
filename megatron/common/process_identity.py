"""Identity of processes: whether the one that had a pid still runs, whoever has that pid by now."""

import os
import socket
from contextlib import suppress
from pathlib import Path


def start_of(pid: int) -> str | None:
    """Return when process `pid` started, in clock ticks since boot; None if it has ended.

    With the pid it identifies a process. psutil counts from the epoch instead, by a clock that
    may be set while the process runs.

    Source: proc_pid_stat(5).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    # The name of the program, in brackets, may hold spaces.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else fields[18]


def is_running(pid: int, started: str) -> bool:
    """Whether the process that had `pid` and started at `started` (see `start_of`) still runs.

    Another user's process, which the system may hide, counts as running.
    """
    now = start_of(pid)
    if now is None:
        with suppress(ProcessLookupError):
            try:
                os.kill(pid, 0)
            except PermissionError:
                return True
    return now == started


def pid_namespace() -> str:
    """Return a text that is equal for processes that see each other by their pids.

    Containers have separate pids, and may share the name of their host.
    """
    with suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()
