"""The first contact between processes, through DeepSpeed."""

import deepspeed
import deepspeed.ops
from deepspeed.utils import logger as deepspeed_logger


def start(backend: str, log_level: str = "warning") -> None:
    """Join the world that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    Args:
        log_level: least level of DeepSpeed's own messages.

    Communication: waits for every rank.
    """
    deepspeed_logger.setLevel(log_level.upper())
    # On CPUs DeepSpeed would compile a shared-memory reduction here, for minutes, which only its
    # inference kernels call; an empty table of operators says that there is none to load.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
