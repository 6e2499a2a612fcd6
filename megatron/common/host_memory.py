"""Available host memory, within the limits of control groups; needs no torch."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class _Hierarchy:
    """Folders and file names of memory limits and usage in a version of control groups."""

    controller: str  # of a line in /proc/PID/cgroup
    folders: tuple[str, ...]  # where it may be mounted
    limit: str
    used: str
    idle: str  # of memory.stat


_HIERARCHIES = (
    _Hierarchy("", (".", "unified"), "memory.max", "memory.current", "inactive_file"),
    _Hierarchy(
        *("memory", ("memory",)),
        *("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ),
)


def available_bytes(
    own: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the memory that processes may still take.

    The least of what the machine has and what is left under the limits of this process's control
    group and of those around it, such as of a container or a job. Files that lie in memory unused
    count as used in a group, but are given up for processes.

    Source: cgroup-v2.rst and cgroup-v1/memory.rst of the Linux kernel.
    """
    return max(0, min([psutil.virtual_memory().available, *_group_limits(own, groups)]))


def _group_limits(own: Path, groups: Path) -> Iterator[int]:
    """Yield the free memory of each control group that has a limit, for versions 1 and 2."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    paths = {line.split(":", 2)[1]: line.split(":", 2)[2].lstrip("/") for line in lines}
    for kind in _HIERARCHIES:
        for folder in kind.folders:
            path = Path(paths.get(kind.controller, ""))
            # In a container the path may be that outside of it: what is mounted is its own group.
            for group in (path, *path.parents):
                # No limit is the word max, and the root group has no such files.
                with suppress(OSError, ValueError):
                    yield _bytes_left(groups / folder / group, kind)


def _bytes_left(group: Path, kind: _Hierarchy) -> int:
    limit, used = (
        int((group / name).read_text(encoding="ascii")) for name in (kind.limit, kind.used)
    )
    return limit - used + _idle(group / "memory.stat", kind.idle)


def _idle(stat: Path, name: str) -> int:
    with suppress(OSError):
        for line in stat.read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0
