"""Atomic writes: files and folders that appear complete or not at all, also after a crash."""

import errno
import glob
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from socket import gethostname
from typing import BinaryIO

from megatron.common.process_identity import is_running, pid_namespace, start_of

log = logging.getLogger(__name__)


def replace_text(
    file: Path, text: str, *, has_one_writer: bool = False, is_flushed: bool = False
) -> None:
    """Write `text` to `file`, which at every moment holds the older or the newer content.

    Args:
        is_flushed: whether the text is on the disk before it replaces the older; otherwise a power
            failure may take both.
        has_one_writer: whether no other process writes it meanwhile; what a killed one left
            next to `file` is then taken over by the next.

    Raises:
        OSError: it cannot be written; `file` is as before.
    """
    suffix = "staging" if has_one_writer else f"{gethostname()}.{os.getpid()}"
    made = file.with_name(f"{file.name}.{suffix}")
    try:
        made.write_text(text, encoding="utf-8")
        if is_flushed:
            _sync(made)
        os.replace(made, file)
    except BaseException:
        with suppress(OSError):
            made.unlink()
        raise


_MADE_BY = re.compile(r"\.(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{8}\.tmp$")
_STALE_S = 3600.0  # after which a temporary file that does not change is logged


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to, which replaces `path` if nothing goes wrong."""
    temporary = temporary_beside(path)
    try:
        yield temporary
        flush(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_beside(path: Path) -> Path:
    """Return an unused name in the directory of `path`, so that a rename can publish the file.

    What killed processes of this machine left there of the same file is removed. What others
    left, on a disk that machines share, is logged: whether they run is not known here.
    """
    for left in path.parent.glob(f"{glob.escape(path.name)}.*.tmp"):
        made_by = _MADE_BY.search(left.name)
        with suppress(OSError):
            if made_by and made_by["machine"] == _machine():
                if not is_running(int(made_by["pid"]), made_by["start"]):
                    left.unlink()
            elif time.time() - left.stat().st_mtime > _STALE_S:
                log.warning("%s has not changed for long; remove it if nothing writes there", left)
    pid = os.getpid()
    unique = f"{_machine()}-{pid}-{start_of(pid) or 0}-{os.urandom(4).hex()}"
    return path.with_name(f"{path.name}.{gethostname()[:20]}.{unique}.tmp")


@cache
def _machine() -> str:
    """Return a hash that is equal where the same pid is the same process, and nowhere else."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        boot = ""
    return sha256(f"{boot} {pid_namespace()}".encode()).hexdigest()[:8]


def flush(path: Path) -> None:
    """Wait until the content of `path`, if it is there, is on the disk."""
    if path.exists():
        _sync(path)


class NotRegularError(OSError):
    """A FIFO, a folder or a device stands where a file is expected."""


def require_regular(file: Path) -> None:
    """Refuse a path that is not a regular file: to open a FIFO may block for ever.

    Raises:
        NotRegularError: it is something else.
        OSError: it is not there, or cannot be looked at.
    """
    if not stat.S_ISREG(file.stat().st_mode):
        raise NotRegularError(errno.EINVAL, "not a regular file", str(file))


def open_regular(file: Path) -> BinaryIO:
    """Open the regular file `file` to read bytes; see `require_regular`."""
    require_regular(file)
    return file.open("rb")


def remove_any(path: Path) -> None:
    """Remove a file, a symbolic link (not what it points to), or a folder with all in it.

    Raises:
        OSError: it cannot be removed.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextmanager
def staged_folder(staging: Path, target: Path) -> Iterator[Path]:
    """Give `staging` to write to, on the disk of `target`; it gets that name if nothing goes wrong.

    What an earlier process left there is removed. All files are on disk before they count.

    Raises:
        OSError: it cannot be written, or `target` holds something; nothing is left of it.
    """
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        yield staging
        _sync_all_in(staging)
        os.rename(staging, target)
        sync_folder(target.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _sync_all_in(folder: Path) -> None:
    for directory, _, names in os.walk(folder):
        for name in names:
            _sync(Path(directory, name))
        sync_folder(Path(directory))


def sync_folder(folder: Path) -> None:
    """Make sure that the names in `folder` are on disk."""
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
