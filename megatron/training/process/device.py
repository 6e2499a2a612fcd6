"""Device of this process, chosen before any library that needs the choice is imported."""

import logging
from dataclasses import replace

import torch

from megatron.common.errors import ConfigError
from megatron.common.nvidia import driver, gpu_obstacle, num_nvidia_devices
from megatron.config.parallelism.layout import ParallelConfig
from megatron.training.process.environment import (
    Launch,
    export_launch,
    hides_gpus,
    launch_notices,
    read_launch,
)

log = logging.getLogger(__name__)


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
    divides = parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1
    export_launch(launch, device.type, device_index=device.index, sequence_parallel=divides)
    return launch, device


def choose_device(requested: str, launch: Launch) -> torch.device:
    """Return the device of this process's tensors.

    Raises:
        ConfigError: a GPU is requested and there is none, none is left for this process, or PyTorch
            cannot use those of this node and the CPU is not requested.
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
        # A scheduler may show each process one of its own; `start_processes` finds out.
        return torch.device("cuda", 0)
    if launch.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"{launch.local_size} processes were started on this node, but it has "
            f"{torch.cuda.device_count()} visible GPUs; start one process per GPU, or write "
            "--device cpu"
        )
    return torch.device("cuda", launch.local_rank)
