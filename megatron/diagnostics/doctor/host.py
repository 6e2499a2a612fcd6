"""Check a host: CPU cores, memory, shared memory, resource limits, compilers."""

import os
import platform
import resource
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from megatron.common.host_memory import available_bytes
from megatron.common.nvidia import num_nvidia_devices
from megatron.diagnostics.doctor.findings import GIB, MIB, Problem, Section, format_bytes

_MOST_LOAD = 1.5  # for each core
_LEAST_MEMORY = GIB
_LEAST_SHARED = 64 * MIB
_LEAST_SHARED_OF_GPUS = GIB  # NCCL's transport between processes of a node
_LEAST_FILES = 1024
_FILES_PER_PROCESS = 16  # sockets to each other process, in the groups of a run
_STALE_LOCK_S = 3600.0

COMPILERS = ("gcc", "g++", "clang", "nvcc", "ninja")


def host_section(*, processes: int) -> Section:
    """Return cores, memory and limits of this host.

    Args:
        processes: of the run.
    """
    memory, shared = available_bytes(), shared_memory()
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    usable = len(os.sched_getaffinity(0))
    swap, (load, *_) = psutil.swap_memory(), os.getloadavg()
    facts = {
        "machine": f"{platform.machine()}, load {load:.1f}",
        "cores": f"{usable} of {os.cpu_count()} usable",
        "memory": f"{format_bytes(memory)} available",
        "swap": f"{format_bytes(swap.used)} of {format_bytes(swap.total)} used",
        "shared memory (/dev/shm)": format_bytes(shared) if shared is not None else "none",
        "open files": f"{_limit(files)}, at most {_limit(most_files)}",
        "locked memory": _limit(locked, is_bytes=True),
    }
    problems = (
        *load_problems(load, cores=os.cpu_count() or usable),
        *memory_problems(memory),
        *swap_problems(swap.used, memory),
        *shared_memory_problems(shared, num_gpus=num_nvidia_devices()),
        *open_file_problems(files, most_files, processes=processes),
        *locked_memory_problems(locked, has_infiniband=Path("/sys/class/infiniband").exists()),
    )
    return Section("host", facts, problems)


def compilers_section(*, needs: Mapping[str, str], extensions: Path, now: float) -> Section:
    """Return the installed compilers.

    Args:
        needs: required compilers, such as "gcc or clang" for either of them, each with its user.
        extensions: folder of compiled extensions.
        now: seconds since the epoch.
    """
    paths = {name: shutil.which(name) for name in COMPILERS}
    facts = {name: path or "not found" for name, path in paths.items()}
    problems = (
        *compiler_problems({name for name, path in paths.items() if path}, needs),
        *lock_problems(extensions, now=now),
    )
    return Section("compilers", facts, problems)


def load_problems(load: float, *, cores: int) -> Iterator[Problem]:
    """Yield a problem if other processes occupy the cores of the machine.

    Args:
        load: number of processes that compute or wait for a core, over the last minute.
    """
    if load > _MOST_LOAD * cores:
        yield Problem(
            f"the load is {load:.1f} on {cores} cores: other processes compete for them",
            "find them with `top`, end them or wait; a run next to them is slow, and its ranks wait "
            "for each other",
        )


def memory_problems(available: int) -> Iterator[Problem]:
    """Yield a problem if the memory is too small for a process of a run."""
    if available < _LEAST_MEMORY:
        yield Problem(
            f"only {format_bytes(available)} of memory is available",
            f"end other programs, or raise the limit of the container or the job: a process takes "
            f"{format_bytes(_LEAST_MEMORY)} before it has read a model",
        )


def swap_problems(used: int, available: int) -> Iterator[Problem]:
    """Yield a problem if more is in swap than memory has room for."""
    if used > available:
        yield Problem(
            f"{format_bytes(used)} is in swap, and {format_bytes(available)} of memory is available",
            "end other programs: memory that is read back from a disk stops a run for seconds",
        )


def shared_memory_problems(size: int | None, *, num_gpus: int) -> Iterator[Problem]:
    """Yield a problem if /dev/shm is too small for the communication of a node's processes."""
    least = _LEAST_SHARED_OF_GPUS if num_gpus > 1 else _LEAST_SHARED
    if size is None or size < least:
        yield Problem(
            f"/dev/shm holds {format_bytes(size or 0)}, and should hold {format_bytes(least)}",
            "start the container with --shm-size=8g or --ipc=host, or run `mount -o "
            "remount,size=8g /dev/shm`",
        )


def open_file_problems(soft: int, hard: int, *, processes: int) -> Iterator[Problem]:
    """Yield a problem if the limit of open files is too low for files and connections."""
    least = max(_LEAST_FILES, _FILES_PER_PROCESS * processes)
    if soft != resource.RLIM_INFINITY and soft < least:
        higher = hard == resource.RLIM_INFINITY or hard >= least
        yield Problem(
            f"a process may open {soft} files, and {processes} processes should each be able to "
            f"open {least}",
            f"run `ulimit -n {least}` before the start"
            + ("" if higher else ", after root has raised nofile in /etc/security/limits.conf"),
        )


def locked_memory_problems(soft: int, *, has_infiniband: bool) -> Iterator[Problem]:
    """Yield a problem if the limit of locked memory is too low for InfiniBand's buffers."""
    if has_infiniband and soft != resource.RLIM_INFINITY:
        yield Problem(
            f"a process may lock {format_bytes(soft)} of memory; InfiniBand needs more",
            "run `ulimit -l unlimited`, or set memlock in /etc/security/limits.conf or SLURM's "
            "PropagateResourceLimitsExcept",
        )


def compiler_problems(present: set[str], needs: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the required compilers that are missing."""
    for wanted, user in needs.items():
        if present.isdisjoint(wanted.split(" or ")):
            yield Problem(f"{user} needs {wanted}, which is not on PATH", f"install {wanted}")


def lock_problems(extensions: Path, *, now: float) -> Iterator[Problem]:
    """Yield stale locks of killed compilations, for which all later compilations wait."""
    for lock in sorted([*extensions.glob("*/lock"), *extensions.glob("*/*/lock")]):
        with suppress(OSError):
            if now - lock.stat().st_mtime > _STALE_LOCK_S:
                yield Problem(
                    f"{lock} is left from a compilation that began over an hour ago",
                    f"unless it still runs, `rm {lock}`: the next compilation waits until the file is removed",
                )


def shared_memory(folder: Path = Path("/dev/shm")) -> int | None:
    """Return the size of the file system of `folder` in bytes; None when there is none."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    return disk.f_blocks * disk.f_frsize


def _limit(number: int, *, is_bytes: bool = False) -> str:
    if number == resource.RLIM_INFINITY:
        return "unlimited"
    return format_bytes(number) if is_bytes else str(number)
