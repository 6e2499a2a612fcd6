"""The first contact between processes, through DeepSpeed."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import deepspeed
import deepspeed.ops
import torch.distributed as dist
from deepspeed.utils import logger as deepspeed_logger

from megatron.errors import TrainingError

log = logging.getLogger(__name__)

_SILENCE_S = 10.0
"""How long processes may look for each other before rank 0 says that they do."""


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


@contextmanager
def meeting(place: str, world_size: int) -> Iterator[None]:
    """Say it when processes do not find each other inside the `with` block.

    Args:
        place: where they look for each other, for messages.

    Raises:
        TrainingError: not all processes have come in time, or they cannot reach the place.
    """
    tells = threading.Timer(
        _SILENCE_S, log.info, ("waiting at %s until all %d processes have come", place, world_size)
    )
    tells.daemon = True
    tells.start()
    try:
        yield
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        reason = str(error).partition("\n")[0]
        raise TrainingError(
            f"the {world_size} processes have not met at {place} ({reason}); look whether all were "
            "started and none has failed, whether every host reaches that address and port (a "
            "firewall, another run on the port), and which network card is taken "
            "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME); --distributed-timeout-minutes is how long "
            "they wait"
        ) from error
    finally:
        tells.cancel()


def limit_waiting(timeout_minutes: int) -> None:
    """Let no operation of any group of this rank wait longer than that for other ranks.

    Groups that libraries make, DeepSpeed's among them, do not inherit the first one's limit.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timedelta(minutes=timeout_minutes), group)


def is_first_to_claim(name: str) -> bool:
    """Whether no other rank has called this with the same name, in this start of the run."""
    return dist.distributed_c10d._get_default_store().add(f"claim/{name}", 1) == 1
