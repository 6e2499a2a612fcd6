"""System information of a run: versions, devices, hosts, and the state of its source code."""

from collections import Counter
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from socket import gethostname

import torch
import torch.distributed as dist

from megatron.checkpointing.compare import Difference
from megatron.common.nvidia import driver
from megatron.common.version import VERSION, commit
from megatron.training.loop.collectives import post

_LIBRARIES = ("torch", "deepspeed", "numpy", "triton")

SystemInfo = Mapping[str, str]
"""Versions, devices and hosts by name; "" for absent ones."""


def system_info() -> SystemInfo:
    """Return the system information of all ranks, versions as rank 0 has them; there alone.

    Other ranks get {}: the names of all hosts are in it.

    Communication: every rank must call this, in step.
    """
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    device = torch.cuda.get_device_name() if on_gpu else "CPU"
    posted = post((device, gethostname()))
    if dist.get_rank():
        return {}
    found = posted.all()
    devices = Counter(name for name, _ in found)
    hosts = dict.fromkeys(host for _, host in found)
    return {
        "megatron": VERSION,
        "commit": commit(),
        "python": python_version(),
        **{name: _version(name) for name in _LIBRARIES},
        "cuda": str(torch.version.cuda or ""),
        "driver": driver(),
        "devices": ", ".join(f"{number} x {name}" for name, number in devices.items()),
        "hosts": ", ".join(hosts),
    }


def differences(then: SystemInfo, now: SystemInfo) -> list[Difference]:
    """Return the differences; a value that `then` lacks is no difference."""
    return [
        Difference(name, then[name], value)
        for name, value in now.items()
        if name in then and then[name] != value
    ]


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""
