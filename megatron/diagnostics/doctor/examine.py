"""Run all checks of the doctor on every host: software, hardware, network, and kernels of a run."""

import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.common.errors import ConfigError
from megatron.config.config import Config
from megatron.config.tools.diagnostics import DoctorConfig
from megatron.diagnostics.doctor.devices import devices_section
from megatron.diagnostics.doctor.disk import disk_section
from megatron.diagnostics.doctor.findings import Examined, Problem, Section
from megatron.diagnostics.doctor.host import compilers_section, host_section
from megatron.diagnostics.doctor.network import clock_section, join_ranks, network_section
from megatron.diagnostics.doctor.run import compilers_needed, kernels_section, tokenizer_section
from megatron.diagnostics.doctor.versions import versions_section
from megatron.tensor_parallel.object_collectives import all_gather_objects
from megatron.training.process.device import choose_device
from megatron.training.process.environment import Launch, compiled_extensions


def examine(
    config: Config,
    options: DoctorConfig,
    launch: Launch,
    *,
    is_example: bool,
    join: Callable[[Launch], Section | None] = join_ranks,
) -> list[Examined]:
    """Return the findings of every host on rank 0, and nothing on the other ranks.

    If the rendezvous fails, the first rank of each host returns the findings of its host.

    Args:
        is_example: whether the training flags are an example, not a run's flags.
        join: joins the process group, and returns the problem if that fails.

    Communication: every rank must call this.
    """
    device, unavailable = _device(config, launch)
    if launch.world_size == 1:
        return [_host(config, options, launch, device, *unavailable, is_example=is_example)]
    if failed := join(launch):
        if launch.local_rank:
            return []
        return [_host(config, options, launch, device, *unavailable, failed, is_example=is_example)]
    records = all_gather_objects((launch.local_rank == 0, unavailable))
    firsts = [rank for rank, (is_first, _) in enumerate(records) if is_first and rank]
    exchanged = [network_section(launch, device), clock_section(firsts)]
    own = None
    if launch.local_rank == 0:
        # Findings about all ranks are reported once, by rank 0.
        all_sections = [section for _, sections in records for section in sections]
        more = [*all_sections, *exchanged] if launch.rank == 0 else []
        own = _host(config, options, launch, device, *more, is_example=is_example)
    found = all_gather_objects(own)
    dist.destroy_process_group()
    return _with_unique_names([one for one in found if one]) if launch.rank == 0 else []


def _device(config: Config, launch: Launch) -> tuple[torch.device, list[Section]]:
    """Return the device that a run would use in this process, and a problem if there is none."""
    try:
        return choose_device(config.parallel.device, launch), []
    except ConfigError as error:
        problem = Problem(f"rank {launch.rank} has no device", str(error))
        return torch.device("cpu"), [Section("processes", {}, (problem,))]


def _host(
    config: Config,
    options: DoctorConfig,
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
        disk_section(Path(options.path).absolute()),
        kernels_section(
            config,
            device,
            is_example=is_example,
            # The doctor may run in one process, and the run in more.
            processes=launch.world_size if launch.world_size > 1 else None,
        ),
        tokenizer_section(config),
    ]
    return Examined(socket.gethostname(), [*sections, *more])


def _with_unique_names(examined: list[Examined]) -> list[Examined]:
    """Number hosts that have the same name."""
    names = [one.host for one in examined]
    return [
        Examined(f"{one.host} #{names[:index].count(one.host) + 1}", one.sections)
        if names.count(one.host) > 1
        else one
        for index, one in enumerate(examined)
    ]
