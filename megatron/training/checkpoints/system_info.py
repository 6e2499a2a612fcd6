"""System information of a run: versions, devices, hosts, and the state of its own source."""

from collections import Counter
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from socket import gethostname

import torch

from megatron.checkpointing.compare import Difference
from megatron.common.version import VERSION, commit
from megatron.training.loop.collectives import all_gather_items, from_rank_0

_LIBRARIES = ("torch", "deepspeed", "numpy", "triton")
_DRIVER = Path("/proc/driver/nvidia/version")

SystemInfo = Mapping[str, str]
"""Versions, devices and hosts by name; "" for absent ones."""


def system_info() -> SystemInfo:
    """Return the system information of all ranks, versions as rank 0 has them.

    Communication: every rank must call this, in step.
    """
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    own = torch.cuda.get_device_name() if on_gpu else "CPU"
    found = list(all_gather_items([(own, gethostname())]))
    devices = Counter(name for name, _ in found)
    hosts = dict.fromkeys(host for _, host in found)
    return {
        "megatron": VERSION,
        "commit": from_rank_0(commit),
        "python": python_version(),
        **{name: _version(name) for name in _LIBRARIES},
        "cuda": str(torch.version.cuda or ""),
        "driver": driver(),
        "devices": ", ".join(f"{number} x {name}" for name, number in devices.items()),
        "hosts": ", ".join(hosts),
    }


def changed(then: SystemInfo, now: SystemInfo) -> list[Difference]:
    """Return the differences; a value that `then` lacks is no difference."""
    return [
        Difference(name, then[name], value)
        for name, value in now.items()
        if name in then and then[name] != value
    ]


def driver(file: Path = _DRIVER) -> str:
    """Return the version of NVIDIA's driver."""
    try:
        first = file.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return ""
    return next((word for word in first.split() if word[0].isdigit() and "." in word), first)


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""
