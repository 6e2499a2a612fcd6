"""Measure a disk: free space, write and read bandwidth."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

from megatron.diagnostics.doctor.findings import GIB, MIB, Problem, Section, format_bytes

_CHUNK = 16 * MIB
_MOST = 2 * GIB
_LEAST_FREE = GIB


@dataclass(frozen=True)
class Disk:
    """Free space and bandwidth of a disk.

    Args:
        written, read: bytes per second.
    """

    free_bytes: int
    written: float
    read: float


def disk_section(folder: Path, *, seconds: float = 1.0) -> Section:
    """Measure the disk of `folder` with a temporary file.

    Args:
        seconds: length of the writing, and of the reading.
    """
    # A fact, not a part of the title: hosts may have different folders.
    where = {"folder": str(folder)}
    try:
        disk = measure_disk(folder, seconds=seconds)
    except OSError as error:
        why = error.strerror or str(error)
        problem = Problem(
            f"--path {folder}: cannot be written to ({why})",
            "create the folder, make it writable for this user, or name another one",
        )
        return Section("disk", where | {"state": why}, (problem,))
    facts = where | {
        "free": format_bytes(disk.free_bytes),
        "write": f"{format_bytes(disk.written)}/s, flushed to the disk",
        "read": f"{format_bytes(disk.read)}/s",
    }
    return Section("disk", facts, tuple(disk_problems(folder, disk)))


def disk_problems(folder: Path, disk: Disk) -> Iterator[Problem]:
    """Yield a problem if the disk is nearly full."""
    if disk.free_bytes < _LEAST_FREE:
        yield Problem(
            f"the disk of {folder} has only {format_bytes(disk.free_bytes)} free",
            "free some space: a checkpoint takes about 16 bytes for each parameter",
        )


def measure_disk(folder: Path, *, seconds: float) -> Disk:
    """Measure the disk of `folder`.

    Raises:
        OSError: it cannot be written to.
    """
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    chunk = os.urandom(_CHUNK)
    with NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        began_at, size = time.perf_counter(), 0
        while size < min(_MOST, free // 2) and time.perf_counter() < began_at + seconds:
            size += os.write(file.fileno(), chunk)
            # All at once at the end could take minutes.
            os.fdatasync(file.fileno())
        written = size / (time.perf_counter() - began_at)
        # Otherwise it would be read from the page cache.
        with suppress(OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began_at, position = time.perf_counter(), 0
        while position < size and time.perf_counter() < began_at + seconds:
            position += len(os.pread(file.fileno(), _CHUNK, position))
        return Disk(free, written, position / (time.perf_counter() - began_at))
