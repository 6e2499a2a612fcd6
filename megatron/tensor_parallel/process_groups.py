"""Process groups of this rank: tensor, sequence, data and model parallel."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron.tensor_parallel.topology import Topology


@dataclass(frozen=True)
class Groups:
    """Process groups that this rank is a member of.

    Args:
        topology: the grid of all ranks.
        rank: global rank of this process.
        tensor: tensor-parallel ranks, which share its layers.
        sequence: sequence-parallel ranks (Ulysses), which share its samples.
        data: data-parallel ranks: the same shard of the model and of the sequence.
        data_and_sequence: all ranks with the same shard of the model.
        model: the ranks of one replica (tensor and pipeline parallel).
        expert: the ranks that divide the experts of a layer; None where experts are divided as other
            layers are.
        expert_tensor: the ranks that divide each of their experts; None likewise.
        expert_data: all ranks with the same shard of the same experts; None likewise.
    """

    topology: Topology
    rank: int
    tensor: dist.ProcessGroup
    sequence: dist.ProcessGroup
    data: dist.ProcessGroup
    data_and_sequence: dist.ProcessGroup
    model: dist.ProcessGroup
    expert: dist.ProcessGroup | None = None
    expert_tensor: dist.ProcessGroup | None = None
    expert_data: dist.ProcessGroup | None = None

    @property
    def stage(self) -> int:
        """This rank's pipeline stage."""
        return self.topology.stage_of(self.rank)

    @property
    def data_rank(self) -> int:
        """This rank's data-parallel rank."""
        return self.topology.data_rank_of(self.rank)

    @property
    def sequence_rank(self) -> int:
        """This rank's sequence-parallel rank."""
        return self.topology.sequence_rank_of(self.rank)

    @property
    def tensor_rank(self) -> int:
        """This rank's tensor-parallel rank."""
        return self.topology.tensor_rank_of(self.rank)


def build_groups(topology: Topology) -> Groups:
    """Create this rank's groups. Every rank of the world must call this, in step.

    Communication: creates one process group per set of ranks.
    """
    rank = dist.get_rank()
    divides = topology.divides_experts
    return Groups(
        topology=topology,
        rank=rank,
        tensor=_own_group(rank, topology.tensor_groups()),
        sequence=_own_group(rank, topology.sequence_groups()),
        data=_own_group(rank, topology.data_groups()),
        data_and_sequence=_own_group(rank, topology.data_and_sequence_groups()),
        model=_own_group(rank, topology.model_groups()),
        expert=_own_group(rank, topology.expert_groups()) if divides else None,
        expert_tensor=_own_group(rank, topology.expert_tensor_groups()) if divides else None,
        expert_data=_own_group(rank, topology.expert_data_groups()) if divides else None,
    )


def control_group(groups: Groups, timeout: timedelta) -> dist.ProcessGroup:
    """Create a group of `groups.model` over gloo, for messages that hosts wait for without a GPU.

    Communication: creates one process group per replica; every rank must call this, in step.
    """
    sets = groups.topology.model_groups()
    return _own_group(groups.rank, sets, backend="gloo", timeout=timeout)


def lone_group() -> dist.ProcessGroup:
    """Create a process group of this process alone, for inference, conversion and tests."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def _own_group(rank: int, sets: list[list[int]], **options: Any) -> dist.ProcessGroup:
    groups = [
        group for ranks in sets if (group := dist.new_group(ranks, **options)) and rank in ranks
    ]
    return groups[0]
