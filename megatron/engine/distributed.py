"""The first contact between processes, through DeepSpeed."""

import logging

import deepspeed
import deepspeed.ops
from deepspeed.utils import logger as deepspeed_logger


def start(backend: str) -> None:
    """Join the world that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    Communication: waits for every rank.
    """
    deepspeed_logger.setLevel(logging.WARNING)
    # On CPUs DeepSpeed would compile a shared-memory reduction here, for minutes, which only its
    # inference kernels call; an empty table of operators says that there is none to load.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
