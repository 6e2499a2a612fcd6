"""The processes that share a model for inference, and this one's place among them."""

from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.tensor_parallel.master_address import MasterAddress
from megatron.tensor_parallel.process_groups import Groups, build_groups, lone_group
from megatron.tensor_parallel.rendezvous import rendezvous
from megatron.tensor_parallel.topology import Topology

_PATIENCE = timedelta(days=365)  # others wait as long as nobody asks for anything
_MEETING = timedelta(minutes=30)


def lone_groups() -> Groups:
    """Return the groups of a process that has the whole model."""
    lone_group()
    return build_groups(Topology(pipeline=1, data=1, tensor=1))


def join_processes(
    *,
    tensor: int,
    pipeline: int,
    replicas: int,
    backend: str,
    device: torch.device,
    place: MasterAddress,
) -> Groups:
    """Return the groups of this process among those that share the model or have another.

    Args:
        place: where the processes meet.

    Raises:
        TrainingError: they do not.

    Communication: waits for every rank.
    """
    if tensor * pipeline * replicas == 1:
        return lone_groups()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=rendezvous(place, _MEETING),
        rank=place.rank,
        world_size=place.world_size,
        timeout=_PATIENCE,
    )
    return build_groups(Topology(pipeline=pipeline, data=replicas, tensor=tensor))
