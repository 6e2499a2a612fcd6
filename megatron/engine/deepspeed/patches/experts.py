"""DeepSpeed's names of expert parallelism: process groups, marks of gradients, layers, files."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch.distributed as dist
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.utils import groups
from torch import Tensor, nn


def register_expert_groups(
    name: str, expert: dist.ProcessGroup, expert_data: dist.ProcessGroup, *, tensor: int
) -> None:
    """Give DeepSpeed the process groups of expert parallelism (`groups._EXPERT_PARALLEL_GROUP`).

    Args:
        name: of the groups.
        expert: the ranks that divide the experts.
        expert_data: the ranks with the same experts, over which their gradients are reduced.
        tensor: tensor-parallel size of experts.
    """
    groups._EXPERT_PARALLEL_GROUP[name] = expert
    groups._EXPERT_PARALLEL_GROUP_RANKS[name] = dist.get_process_group_ranks(expert)
    groups._EXPERT_DATA_PARALLEL_GROUP[name] = expert_data
    groups._EXPERT_DATA_PARALLEL_GROUP_RANKS[name] = dist.get_process_group_ranks(expert_data)
    groups.expert_tensor_parallel_world_size = tensor


def mark_expert_gradient(parameter: Any, name: str) -> None:
    """Let the gradient of `parameter` be reduced over the experts' groups `name` (`allreduce`)."""
    parameter.allreduce = False
    parameter.group_name = name


def divide_expert_gradients(engine: Any, parts: int) -> None:
    """Divide the averages of experts' gradients over the replicas by `parts`, without ZeRO and in bf16.

    DeepSpeed computes these averages in `_reduce_expert_gradients`.
    """
    if parts == 1:
        return
    reduce = engine._reduce_expert_gradients

    def divide_and_reduce(gradients: dict[str, list[Tensor]], elements: int) -> None:
        for gradient in chain.from_iterable(gradients.values()):
            gradient.div_(parts)
        reduce(gradients, elements)

    engine._reduce_expert_gradients = divide_and_reduce


@contextmanager
def with_experts(layer_class: type[nn.Module] | None) -> Iterator[None]:
    """Let DeepSpeed take layers of `layer_class` for its own with experts (`engine.MoE`).

    It then reduces the gradients of marked parameters over their own groups, while an engine is
    built inside the `with` block and later.
    """
    usual = deepspeed_engine.MoE
    if layer_class is not None:
        deepspeed_engine.MoE = layer_class
    try:
        yield
    finally:
        deepspeed_engine.MoE = usual


@contextmanager
def without_expert_files(engine: Any) -> Iterator[None]:
    """Save a network with experts like any other inside the `with` block (`has_moe_layers`)."""
    usual, engine.has_moe_layers = engine.has_moe_layers, False
    try:
        yield
    finally:
        engine.has_moe_layers = usual
