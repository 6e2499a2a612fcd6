"""Initialize torch.distributed and DeepSpeed: process groups, backend, collective timeout."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.constants import default_pg_timeout
from deepspeed.utils import logger as deepspeed_logger

from megatron.engine.deepspeed.patches.runtime import (
    default_store,
    set_collective_timeout,
    skip_operator_lookup,
)
from megatron.tensor_parallel.master_address import MasterAddress
from megatron.tensor_parallel.rendezvous import rendezvous


def start(
    backend: str,
    log_level: str = "warning",
    *,
    timeout_minutes: int = 0,
    place: MasterAddress | None = None,
    device: torch.device | None = None,
    look: Callable[[], None] = lambda: None,
) -> None:
    """Initialize the default process group, unless that is done.

    Args:
        log_level: of DeepSpeed's own messages.
        timeout_minutes: timeout of one collective; 0: torch's default.
        place: the rendezvous; default: from the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
        device: GPU of this rank.
        look: called about twice a second while this process waits for others; may raise.

    Raises:
        TrainingError: the processes do not meet at `place`.

    Communication: waits for every rank.
    """
    deepspeed_logger.setLevel(log_level.upper())
    skip_operator_lookup()
    timeout = rendezvous_timeout(timeout_minutes)
    if place and not dist.is_initialized():
        # NCCL then connects at once, and finds two ranks on one GPU; see DeepSpeed's TorchBackend.
        bound = device if device and device.type == "cuda" and place.world_size > 1 else None
        dist.init_process_group(
            backend,
            store=rendezvous(place, timeout, look=look),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
            device_id=bound,
        )
    deepspeed.init_distributed(dist_backend=backend, verbose=False, timeout=timeout)
    if timeout_minutes:
        set_collective_timeout(timeout)


def rendezvous_timeout(minutes: int = 0) -> timedelta:
    """Return how long processes wait for each other; of 0 minutes DeepSpeed's default."""
    return timedelta(minutes=minutes) if minutes else default_pg_timeout


def set_timeout(*, minutes: float) -> None:
    """Set the timeout of the collectives of all process groups; at least torch's 10 minutes."""
    set_collective_timeout(timedelta(minutes=max(10, minutes)))


def store() -> Any:
    """Return the key-value store through which the ranks of this run met."""
    return default_store()


def is_first_to_claim(name: str) -> bool:
    """Whether no other rank has called this with the same name, in this start of the run."""
    return store().add(f"claim/{name}", 1) == 1
