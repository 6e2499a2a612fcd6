"""Device of this process, chosen before any library that needs the choice is imported."""

import logging
from dataclasses import replace

import torch

from megatron.common.errors import ConfigError
from megatron.common.nvidia import driver, gpu_obstacle, num_nvidia_devices
from megatron.config.parallelism.layout import ParallelConfig, sequence_flags
from megatron.training.process.environment import (
    Launch,
    export_launch,
    hides_gpus,
    launch_notices,
    read_launch,
    use_one_queue,
)

log = logging.getLogger(__name__)

_BLACKWELL = (10, 0)
"""Compute capability from which the order of collectives does not depend on the number of queues."""


def prepare_process(
    parallel: ParallelConfig, *, world_size: int | None = None
) -> tuple[Launch, torch.device]:
    """Return this process's rank and device, and export them for libraries.

    Args:
        world_size: ranks of the run, if not all processes that were started; the others are spares.

    Raises:
        ConfigError: the launcher's variables contradict themselves or the machine.
    """
    launch = read_launch(parallel.local_rank)
    if world_size is not None:
        launch = replace(launch, world_size=world_size, spares=launch.world_size - world_size)
    for notice in launch_notices():
        log.warning("%s", notice)
    device = choose_device(parallel.device, launch)
    if device.type == "cuda":
        _use_one_queue(parallel, device)
    export_launch(launch, device.type, device_index=device.index)
    return launch, device


def _use_one_queue(parallel: ParallelConfig, device: torch.device) -> None:
    """Let collectives that overlap with computation start in the order in which they were issued.

    Raises:
        ConfigError: the variable has another value, on a GPU older than Blackwell.
    """
    sizes = {
        "--tensor-model-parallel-size": parallel.tensor_model_parallel_size,
        **sequence_flags(parallel),
    }
    flags = [f"{flag} {size}" for flag, size in sizes.items() if size > 1]
    if not flags:
        return
    queues = use_one_queue()
    if queues != "1" and torch.cuda.get_device_capability(device) < _BLACKWELL:
        raise ConfigError(
            f"CUDA_DEVICE_MAX_CONNECTIONS={queues} with {' and '.join(flags)}: set it to 1 or unset "
            "it, so that collectives run in the order of the computation around them"
        )


def choose_device(requested: str, launch: Launch) -> torch.device:
    """Return the device of this process's tensors.

    Raises:
        ConfigError: a GPU is requested and there is none, none is left for this process, or PyTorch
            cannot use the GPUs of this node and the CPU is not requested.
    """
    available = torch.cuda.is_available()
    if requested == "auto" and not available and not hides_gpus():
        obstacle = gpu_obstacle(
            driver=driver(), build=str(torch.version.cuda or ""), nodes=num_nvidia_devices()
        )
        if obstacle:
            raise ConfigError(f"{'; '.join(obstacle)}; or write --device cpu to use the CPUs")
    if requested == "cpu" or (requested == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise ConfigError(
            "--device cuda: no GPU is visible on this node; look at nvidia-smi and "
            "CUDA_VISIBLE_DEVICES, or write --device cpu"
        )
    if torch.cuda.device_count() == 1:
        # A scheduler may show each process a different GPU; `start_processes` finds out.
        return torch.device("cuda", 0)
    if launch.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"{launch.local_size} processes were started on this node, but it has "
            f"{torch.cuda.device_count()} visible GPUs; start one process per GPU, or write "
            "--device cpu"
        )
    return torch.device("cuda", launch.local_rank)
