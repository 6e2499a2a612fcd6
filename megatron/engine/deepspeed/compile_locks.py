"""Stale compile locks: the file `lock` that a killed compilation of a torch extension leaves.

Torch waits for it without a limit and without a message. While it compiles, the owner keeps the
file open, and the kernel knows whether any process of this host does, in whichever container.
"""

import errno
import fcntl
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)

_PERIOD_S = 2.0
_LOCAL = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}
"""File systems of one host: on others, the owner may run elsewhere."""


@contextmanager
def watching_compile_locks(extensions: Path, *, period_s: float = _PERIOD_S) -> Iterator[None]:
    """Remove locks below `extensions` whose owners are gone, and log which are waited for.

    Args:
        extensions: the folder in which torch compiles extensions.
    """
    ended = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(extensions, ended, period_s), name="compile locks", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _watch(extensions: Path, ended: threading.Event, period_s: float) -> None:
    logged: set[Path] = set()
    before: dict[Path, int] = {}
    while True:
        now: dict[Path, int] = {}
        for lock in (*extensions.glob("*/lock"), *extensions.glob("*/*/lock")):
            with suppress(OSError), lease_abandoned(lock) as inode:
                # An owner that ends closes the file before it removes it: hence twice. No other
                # process can open the file here, so none removes a newer one under this name.
                if inode and before.get(lock) == inode == lock.stat().st_ino:
                    lock.unlink()
                    log.warning("%s was left by a compilation that was killed: removed", lock)
                elif inode:
                    now[lock] = inode
                elif lock not in logged and not _is_open_here(lock):
                    logged.add(lock)
                    log.info(
                        "%s, made %.0f s ago, is the lock of a compilation: a process that needs "
                        "the same waits until it is gone; if nothing compiles there any more, "
                        "remove it",
                        *(lock, time.time() - lock.stat().st_mtime),
                    )
        before = now
        if ended.wait(period_s):
            return


@contextmanager
def lease_abandoned(lock: Path) -> Iterator[int | None]:
    """Hold a lease on a lock that no process has open, and give its inode; None if one may.

    Raises:
        OSError: it is gone.
    """
    if _file_system(lock) not in _LOCAL or _is_built(lock.parent):
        yield None
        return
    try:
        # Without waiting for a process that holds the lease.
        descriptor = os.open(lock, os.O_RDONLY | os.O_NONBLOCK)
    except (PermissionError, BlockingIOError):
        yield None
        return
    with closing(os.fdopen(descriptor, "rb")) as file:
        is_abandoned = _lease(descriptor)
        if not is_abandoned:
            file.close()
        yield os.fstat(descriptor).st_ino if is_abandoned else None


def _lease(descriptor: int) -> bool:
    """Take a write lease, which the kernel grants only if no other process has the file open."""
    try:
        # Whoever opens the file meanwhile sends a signal: one that does nothing by itself.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        # Open elsewhere; another user's; or a file system without leases.
        if error.errno in (errno.EAGAIN, errno.EACCES, errno.EINVAL, errno.EPERM):
            return False
        raise
    return True


def _file_system(path: Path) -> str:
    """Return the type of the file system that `path` is on; "" if it is not known."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == wanted:
            return kind.split()[0]
    return ""


def _is_built(folder: Path) -> bool:
    """Whether a process works in `folder`, as ninja does: it outlives the one that started it."""
    for process in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if process.samefile(folder):
                return True
    return False


def _is_open_here(file: Path) -> bool:
    """Whether this process has `file` open."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if descriptor.samefile(file):
                return True
    return False
