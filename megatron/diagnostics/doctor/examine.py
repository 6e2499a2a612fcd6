"""All examinations of a host, and of what its ranks and those of other hosts exchange."""

import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.common.errors import ConfigError
from megatron.config.config import Config
from megatron.config.tools.diagnostics import DoctorConfig
from megatron.diagnostics.doctor.devices import devices_section
from megatron.diagnostics.doctor.disk import disk_section
from megatron.diagnostics.doctor.findings import Examined, Problem, Section
from megatron.diagnostics.doctor.host import compilers_section, host_section
from megatron.diagnostics.doctor.network import clock_section, meet, network_section
from megatron.diagnostics.doctor.run import compilers_needed, kernels_section, tokenizer_section
from megatron.diagnostics.doctor.versions import versions_section
from megatron.training.process.device import choose_device
from megatron.training.process.environment import Launch, compiled_extensions


def examine(
    config: Config, wishes: DoctorConfig, launch: Launch, *, is_example: bool
) -> list[Examined]:
    """Return what was found on every host; nothing on other ranks than 0.

    Where ranks do not meet, the first of each host returns what it found there.

    Args:
        is_example: whether the flags of training are not those of a run.

    Communication: every rank must call this.
    """
    device, doubts = _device(config, launch)
    if launch.world_size == 1:
        return [_host(config, wishes, launch, device, *doubts, is_example=is_example)]
    if failed := meet(launch):
        if launch.local_rank:
            return []
        return [_host(config, wishes, launch, device, *doubts, failed, is_example=is_example)]
    places: list[Any] = [None] * launch.world_size
    dist.all_gather_object(places, (launch.local_rank == 0, doubts))
    firsts = [rank for rank, (is_first, _) in enumerate(places) if is_first and rank]
    exchanged = [network_section(launch, device), clock_section(firsts)]
    own = None
    if launch.local_rank == 0:
        # What is about all ranks is told once.
        everyones = [section for _, sections in places for section in sections]
        more = [*everyones, *exchanged] if launch.rank == 0 else []
        own = _host(config, wishes, launch, device, *more, is_example=is_example)
    found: list[Examined | None] | None = [None] * launch.world_size if launch.rank == 0 else None
    dist.gather_object(own, found)
    dist.destroy_process_group()
    return _named_apart([one for one in found or [] if one])


def _device(config: Config, launch: Launch) -> tuple[torch.device, list[Section]]:
    """Return the device of this process in a run, and what is to be told where there is none."""
    try:
        return choose_device(config.parallel.device, launch), []
    except ConfigError as error:
        problem = Problem(f"rank {launch.rank} has no device", str(error))
        return torch.device("cpu"), [Section("processes", {}, (problem,))]


def _host(
    config: Config,
    wishes: DoctorConfig,
    launch: Launch,
    device: torch.device,
    *more: Section,
    is_example: bool,
) -> Examined:
    sections = [
        versions_section(),
        host_section(processes=launch.world_size),
        devices_section(),
        compilers_section(
            needs=compilers_needed(config, device),
            extensions=compiled_extensions(),
            now=time.time(),
        ),
        disk_section(Path(wishes.path).absolute()),
        kernels_section(
            config,
            device,
            is_example=is_example,
            # One process examines a machine; the run will have more.
            processes=launch.world_size if launch.world_size > 1 else None,
        ),
        tokenizer_section(config),
    ]
    return Examined(socket.gethostname(), [*sections, *more])


def _named_apart(examined: list[Examined]) -> list[Examined]:
    """Number hosts that have the same name."""
    names = [one.host for one in examined]
    return [
        Examined(f"{one.host} #{names[:place].count(one.host) + 1}", one.sections)
        if names.count(one.host) > 1
        else one
        for place, one in enumerate(examined)
    ]
