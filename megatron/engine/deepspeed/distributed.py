"""The first contact between processes, through DeepSpeed."""

from collections.abc import Callable
from datetime import timedelta

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.constants import default_pg_timeout
from deepspeed.utils import logger as deepspeed_logger

from megatron.tensor_parallel.master_address import MasterAddress
from megatron.tensor_parallel.rendezvous import meet


def start(
    backend: str,
    log_level: str = "warning",
    *,
    timeout_minutes: int = 0,
    place: MasterAddress | None = None,
    device: torch.device | None = None,
    look: Callable[[], None] = lambda: None,
) -> None:
    """Join the other processes, unless this one has.

    Args:
        log_level: least level of DeepSpeed's own messages.
        timeout_minutes: how long one operation may wait for other ranks; 0: the default.
        place: where they meet; by the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)
            when None.
        device: GPU of this rank.
        look: called about twice a second while this process waits for others; may raise.

    Raises:
        TrainingError: the processes do not meet at `place`.

    Communication: waits for every rank.
    """
    deepspeed_logger.setLevel(log_level.upper())
    # On CPUs DeepSpeed would compile a shared-memory reduction here, for minutes, which only its
    # inference kernels call; an empty table of operators says that there is none to load.
    deepspeed.ops.__compatible_ops__ = {}
    timeout = timedelta(minutes=timeout_minutes) if timeout_minutes else default_pg_timeout
    if place and not dist.is_initialized():
        # NCCL then connects at once, and finds two ranks on one GPU; see DeepSpeed's TorchBackend.
        bound = device if device and device.type == "cuda" and place.world_size > 1 else None
        dist.init_process_group(
            backend,
            store=meet(place, timeout, look=look),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
            device_id=bound,
        )
    deepspeed.init_distributed(dist_backend=backend, verbose=False, timeout=timeout)
    if timeout_minutes:
        limit_waiting(timeout_minutes)


def limit_waiting(timeout_minutes: int) -> None:
    """Let no operation of any group of this rank, there or to come, wait longer for other ranks.

    A new group does not inherit the first one's limit: it has torch's default of 10 or 30 minutes,
    also while an engine is built.
    """
    timeout, c10d = timedelta(minutes=timeout_minutes), dist.distributed_c10d
    c10d.default_pg_timeout = timeout
    c10d.default_pg_nccl_timeout = timeout  # type: ignore[attr-defined]
    for group in list(c10d._world.pg_map):
        c10d._set_pg_timeout(timeout, group)


def is_first_to_claim(name: str) -> bool:
    """Whether no other rank has called this with the same name, in this start of the run."""
    return dist.distributed_c10d._get_default_store().add(f"claim/{name}", 1) == 1
