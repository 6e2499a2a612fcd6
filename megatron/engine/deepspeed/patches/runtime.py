"""Patches for the start of a process: compiled operators, dtypes, timeouts of process groups, their store.

This package alone touches private names of DeepSpeed and torch, with one function for each. Written
for DeepSpeed 0.19 and torch 2.13; tests/unit/engine/test_patches.py fails for a name that the
installed release has no more.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import deepspeed
import deepspeed.ops
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator


def skip_operator_lookup() -> None:
    """Let DeepSpeed load no compiled operator when it starts (`__compatible_ops__`).

    On CPUs it would compile a shared-memory reduction, for minutes, which only its inference kernels
    call; an empty table of operators says that there is none to load.
    """
    deepspeed.ops.__compatible_ops__ = {}


@contextmanager
def any_dtype() -> Iterator[None]:
    """Build engines in a dtype that this device can store but not compute in (`is_fp16_supported`)."""
    accelerator = get_accelerator()
    usual = accelerator.is_fp16_supported
    accelerator.is_fp16_supported = lambda: True
    try:
        yield
    finally:
        accelerator.is_fp16_supported = usual


def set_collective_timeout(timeout: timedelta) -> None:
    """Set the timeout of every process group of this rank, existing or new (`_world.pg_map`).

    A new group does not inherit the first one's timeout: it has torch's default of 10 or 30 minutes,
    also while an engine is built.
    """
    c10d = dist.distributed_c10d
    c10d.default_pg_timeout = timeout
    c10d.default_pg_nccl_timeout = timeout  # type: ignore[attr-defined]
    for group in list(c10d._world.pg_map):
        c10d._set_pg_timeout(timeout, group)


def default_store() -> Any:
    """Return the key-value store through which the ranks of this run met (`_get_default_store`)."""
    return dist.distributed_c10d._get_default_store()
