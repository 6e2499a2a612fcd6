"""Process groups that a test has made: gloo wakes the threads of each a hundred times a second."""

import gc
import sys

import torch.distributed as dist

made_groups: dict[str, dist.ProcessGroup] = {}
"""Those of runs in this process by their ranks, for the runs that follow."""


def open_groups() -> list[dist.ProcessGroup]:
    """Return the process groups of this process but the one of the whole world."""
    if not dist.is_initialized():
        return []
    return [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]


def _end_engines() -> None:
    """Remove the hooks of DeepSpeed's engines: cycles through autograd, which gc does not see.

    An engine that stays keeps its groups: behind fifteen of them a step takes twice the CPU time.
    """
    gc.collect()
    if module := sys.modules.get("deepspeed.runtime.engine"):
        for one in gc.get_objects():
            if issubclass(type(one), module.DeepSpeedEngine):
                one.destroy()


def end_groups() -> None:
    """End them, and let DeepSpeed forget those that it keeps for its next engine."""
    if made_groups:  # which runs that follow take again
        return
    _end_engines()
    gc.collect()
    for group in open_groups():
        dist.destroy_process_group(group)
    if deepspeed := sys.modules.get("deepspeed.utils.groups"):
        for name, value in [*vars(deepspeed).items()]:
            if isinstance(value, dist.ProcessGroup):
                setattr(deepspeed, name, None)
            elif isinstance(value, dict) and name.isupper():
                value.clear()
        deepspeed.expert_tensor_parallel_world_size = 1
        deepspeed.mpu = None
