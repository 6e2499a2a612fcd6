"""Expert parallelism in DeepSpeed's engine: the experts of a layer, their groups and checkpoints."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron.checkpointing.parameter_names import expert_file
from megatron.config.network.experts import ExpertPlan
from megatron.engine.deepspeed.patches.experts import (
    divide_expert_gradients,
    mark_expert_gradient,
    register_expert_groups,
)
from megatron.model.layers.experts import MixtureOfExperts
from megatron.model.layers.moe_aux_loss import AuxiliaryLoss, ExpertLoad
from megatron.model.layers.parts import MixtureBuilder
from megatron.model.layers.router import Router
from megatron.tensor_parallel.process_groups import Groups
from megatron.tensor_parallel.sharding import is_expert


def mixture_builder(
    plan: ExpertPlan, groups: Groups, *, auxiliary: AuxiliaryLoss
) -> MixtureBuilder:
    """Return a function that builds the experts of a layer.

    Args:
        auxiliary: takes the losses that keep experts evenly busy.
    """
    return partial(
        MixtureOfExperts,
        plan=plan,
        expert_group=groups.expert,
        expert_tensor_group=groups.expert_tensor,
        sequence_group=groups.sequence,
        data_group=groups.data,
        auxiliary=auxiliary,
    )


def register_experts(model: nn.Module, groups: Groups) -> None:
    """Let DeepSpeed reduce the gradients of divided experts over the ranks that have the same ones."""
    if groups.expert is None or groups.expert_data is None:
        return
    name = f"ep_size_{groups.expert.size()}"
    register_expert_groups(
        name, groups.expert, groups.expert_data, tensor=groups.topology.ranks_per_expert
    )
    for parameter in filter(is_expert, model.parameters()):
        mark_expert_gradient(parameter, name)


def average_experts(engine: Any, groups: Groups) -> None:
    """Average gradients of divided experts over all ranks.

    DeepSpeed averages them over replicas, each of which may be several ranks that divide a sample;
    in pipelines such ranks count as replicas.
    """
    if groups.expert is not None and groups.topology.pipeline == 1:
        divide_expert_gradients(engine, groups.topology.sequence)


class ExpertBalance:
    """Collects the loads of a step, and changes the biases of the routers by them.

    Args:
        model: this rank's part of it.
        sequence_parallel: whether tensor-parallel ranks route different tokens.
    """

    def __init__(
        self, model: nn.Module, groups: Groups, auxiliary: AuxiliaryLoss, *, sequence_parallel: bool
    ):
        self._routers = [module for module in model.modules() if isinstance(module, Router)]
        self._groups, self._auxiliary = groups, auxiliary
        self._counts = sequence_parallel or groups.tensor_rank == 0

    def begin_step(self, scale: float) -> None:
        """Multiply the losses by `scale` in the backward passes of the next step."""
        self._auxiliary.scale = scale

    def finish_step(self, micro_batches: int, device: torch.device) -> ExpertLoad:
        """Return the loads of the step, and change the biases.

        Args:
            micro_batches: of this replica.

        Communication: one all-reduce over all ranks.
        """
        load = self._auxiliary.take(
            counts=self._counts,
            micro_batches=micro_batches * self._groups.topology.data,
            device=device,
        )
        for router in self._routers:
            router.finish_step(load.assigned[router.number - 1])
        return load


def save_experts(engine: Any, groups: Groups, folder: Path, write: Callable[..., None]) -> None:
    """Write the experts that DeepSpeed, which writes one replica, does not.

    Their optimizer states are in DeepSpeed's files where it partitions them.
    """
    replica = groups.data_and_sequence.rank()
    if groups.expert_data is None or groups.expert_data.rank() > 0 or not replica:
        return
    named = {n: p for n, p in engine.module.named_parameters() if is_expert(p)}
    optimizer = engine.optimizer
    states = {}
    if optimizer is not None and optimizer is engine.basic_optimizer:
        states = {name: optimizer.state[p] for name, p in named.items() if p in optimizer.state}
    rank = groups.stage * groups.topology.tensor + groups.tensor_rank
    weights = {name: p.detach() for name, p in named.items()}
    path = folder / expert_file(replica, rank)
    write({"module": weights, "optimizer": states}, path)
