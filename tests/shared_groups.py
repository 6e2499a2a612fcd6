"""Process groups of runs in one process: gloo wakes the threads of each a hundred times a second."""

import gc
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

_new_group = dist.new_group
_shared: dict[str, dist.ProcessGroup] = {}
"""Those of runs in this process by their ranks, for the runs that follow."""
_requests: list[str] = []
"""Requests of this rank in which all ranks have to join, since they were last compared."""


def shared_group(ranks: Sequence[int] | None = None, **options: Any) -> Any:
    """Do what `dist.new_group` does, or return the group of these ranks that it has made before.

    To make one takes its ranks milliseconds of waiting for each other, and so does its end.
    """
    key = f"{ranks and list(ranks)} {options}"
    if not options.get("use_local_synchronization"):
        _requests.append(key)
    if key not in _shared:
        _shared[key] = _new_group(ranks, **options)
    return _shared[key]


def differing_requests() -> str:
    """Return which ranks have requested other groups than rank 0 since the last call; "" for none.

    Where no group is shared, one that a rank leaves out hangs the others. All ranks must call this.
    """
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, _requests)
    _requests.clear()
    differing = [rank for rank, requests in enumerate(by_rank) if requests != by_rank[0]]
    return f"ranks {differing} requested other groups than rank 0: {by_rank}" if differing else ""


def open_groups() -> list[dist.ProcessGroup]:
    """Return the process groups of this process but the one of the whole world."""
    if not dist.is_initialized():
        return []
    return [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]


def end_engines() -> None:
    """End DeepSpeed's engines and let it forget the groups that it keeps for its next one.

    The hooks of an engine are cycles through autograd, which gc does not see.
    """
    if module := sys.modules.get("deepspeed.runtime.engine"):
        kinds = {module.DeepSpeedEngine, *_subclasses(module.DeepSpeedEngine)}
        for one in gc.get_objects():
            if type(one) in kinds:
                one.destroy()
        gc.collect()
    if deepspeed := sys.modules.get("deepspeed.utils.groups"):
        for name, value in [*vars(deepspeed).items()]:
            if isinstance(value, dist.ProcessGroup):
                setattr(deepspeed, name, None)
            elif isinstance(value, dict) and name.isupper():
                value.clear()
        deepspeed.expert_tensor_parallel_world_size = 1
        deepspeed.mpu = None


def _subclasses(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)
