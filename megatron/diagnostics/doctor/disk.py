"""How fast a disk takes and gives bytes, and how many it has room for."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

from megatron.diagnostics.doctor.findings import Problem, Section
from megatron.diagnostics.doctor.sizes import GIB, MIB, told_bytes

_CHUNK = 16 * MIB
_MOST = 2 * GIB
_LEAST_FREE = GIB


@dataclass(frozen=True)
class Disk:
    """What a disk gives.

    Args:
        written, read: bytes per second.
    """

    free_bytes: int
    written: float
    read: float


def disk_section(folder: Path, *, seconds: float = 1.0) -> Section:
    """Return what the disk of `folder` gives; what is written there is removed again.

    Args:
        seconds: how long it is written to, and read from.
    """
    # A fact, not a part of the title: hosts may have been given different folders.
    where = {"folder": str(folder)}
    try:
        disk = measure_disk(folder, seconds=seconds)
    except OSError as error:
        why = error.strerror or str(error)
        problem = Problem(
            f"--path {folder}: cannot be written to ({why})",
            "make the folder, give it to this user, or give another one",
        )
        return Section("disk", where | {"state": why}, (problem,))
    facts = where | {
        "free": told_bytes(disk.free_bytes),
        "write": f"{told_bytes(disk.written)}/s, flushed to the disk",
        "read": f"{told_bytes(disk.read)}/s",
    }
    return Section("disk", facts, tuple(disk_problems(folder, disk)))


def disk_problems(folder: Path, disk: Disk) -> Iterator[Problem]:
    """Yield whether the disk is full."""
    if disk.free_bytes < _LEAST_FREE:
        yield Problem(
            f"the disk of {folder} has only {told_bytes(disk.free_bytes)} free",
            "make room: a run writes 16 bytes for each parameter and checkpoint, or so",
        )


def measure_disk(folder: Path, *, seconds: float) -> Disk:
    """Return what the disk of `folder` gives.

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
        # Otherwise it would come out of memory.
        with suppress(OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began_at, position = time.perf_counter(), 0
        while position < size and time.perf_counter() < began_at + seconds:
            position += len(os.pread(file.fileno(), _CHUNK, position))
        return Disk(free, written, position / (time.perf_counter() - began_at))
