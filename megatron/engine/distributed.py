"""The first contact between processes, through DeepSpeed."""

from datetime import timedelta

import deepspeed
import deepspeed.ops
import torch.distributed as dist
from deepspeed.utils import logger as deepspeed_logger


def start(backend: str, log_level: str = "warning", *, timeout_minutes: int = 0) -> None:
    """Join the world that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    Args:
        log_level: least level of DeepSpeed's own messages.
        timeout_minutes: how long one operation may wait for other ranks; 0: the default.

    Communication: waits for every rank.
    """
    deepspeed_logger.setLevel(log_level.upper())
    # On CPUs DeepSpeed would compile a shared-memory reduction here, for minutes, which only its
    # inference kernels call; an empty table of operators says that there is none to load.
    deepspeed.ops.__compatible_ops__ = {}
    waits = {"timeout": timedelta(minutes=timeout_minutes)} if timeout_minutes else {}
    deepspeed.init_distributed(dist_backend=backend, verbose=False, **waits)


def limit_waiting(timeout_minutes: int) -> None:
    """Let no operation of any group of this rank wait longer than that for other ranks.

    Groups that libraries make, DeepSpeed's among them, do not inherit the first one's limit.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timedelta(minutes=timeout_minutes), group)


def is_first_to_claim(name: str) -> bool:
    """Whether no other rank has called this with the same name, in this start of the run."""
    return dist.distributed_c10d._get_default_store().add(f"claim/{name}", 1) == 1
