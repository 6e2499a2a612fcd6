"""Marks on parameters: tensor-parallel shard, expert, partial gradient, initial values; exact division."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Shard:
    """Position of a shard: number `index` of `count` equal ones along `dim`."""

    dim: int
    index: int
    count: int


def exact_quotient(size: int, parts: int, name: str) -> int:
    """Return size / parts, an integer.

    Raises:
        ValueError: `name` does not divide evenly.
    """
    if size % parts:
        raise ValueError(f"{name} {size} is not a multiple of {parts}")
    return size // parts


def mark_sharded(parameter: nn.Parameter, dim: int, group: dist.ProcessGroup) -> nn.Parameter:
    """Mark `parameter` as this rank's shard along `dim` of a tensor sharded over `group`.

    DeepSpeed's gradient norm reads `tensor_model_parallel`; without it a parameter counts as
    replicated.
    """
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.shard = Shard(dim, group.rank(), group.size())  # type: ignore[attr-defined]
    parameter.shard_group = group  # type: ignore[attr-defined]
    return parameter


def mark_transposed(parameter: nn.Parameter) -> nn.Parameter:
    """Mark `parameter` as matrices whose rows are input features; those of others are outputs."""
    parameter.is_transposed = True  # type: ignore[attr-defined]
    return parameter


def mark_partial_gradient(parameter: nn.Parameter, group: dist.ProcessGroup) -> nn.Parameter:
    """Mark `parameter` as one of whose gradient each rank of `group` computes a part.

    A replicated weight with which each rank computes something else: other heads, or other positions
    of the sequence. The engine sums the parts.
    """
    if group.size() > 1:
        parameter.summed_over = group  # type: ignore[attr-defined]
    return parameter


def gradient_group(parameter: nn.Parameter) -> dist.ProcessGroup | None:
    """Return the ranks that have parts of the gradient of `parameter`; None if this rank has all of it."""
    return getattr(parameter, "summed_over", None)


def all_reduce_parts(gradients: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    """Sum the gradients of those parameters of which each rank of a group has a part, in place.

    Args:
        gradients: parameters with their gradients, or with the same slices of them on all ranks.

    Communication: one all-reduce for each group of ranks.
    """
    parts: dict[dist.ProcessGroup, list[Tensor]] = {}
    for parameter, gradient in gradients:
        group = gradient_group(parameter)
        if group is not None:
            parts.setdefault(group, []).append(gradient)
    for group, own in parts.items():
        total = _sum(torch.cat([gradient.flatten() for gradient in own]), group=group)
        sums = total.split([gradient.numel() for gradient in own])
        for gradient, summed in zip(own, sums, strict=True):
            gradient.copy_(summed.view_as(gradient))


def all_reduce_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum the parts of gradients as they come, in hooks.

    Communication: in every backward pass one all-reduce for each marked parameter.
    """
    for parameter in parameters:
        group = gradient_group(parameter)
        if group and parameter.requires_grad:
            parameter.register_hook(partial(_sum, group=group))


def _sum(grad: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    # At least fp32, so that a 16-bit gradient is rounded only once.
    wide = torch.promote_types(grad.dtype, torch.float32)
    total = grad.to(wide, memory_format=torch.contiguous_format, copy=True)
    dist.all_reduce(total, group=group)
    return total.to(grad.dtype)


def shard_of(parameter: Tensor) -> Shard | None:
    """Return the shard that `parameter` is marked as; None for a replicated one."""
    return getattr(parameter, "shard", None)


@dataclass(frozen=True)
class ExpertShare:
    """Rows of a parameter's full tensor that this rank has: share `index` of `replicas` equal ones.

    Rows are experts (mixture of experts). Expert-parallel groups are neighbouring ranks of a stage,
    from the first one on.
    """

    index: int
    replicas: int


def mark_expert(parameter: nn.Parameter, share: ExpertShare) -> None:
    """Mark `parameter` as that of experts which expert-parallel ranks divide."""
    parameter.expert_share = share  # type: ignore[attr-defined]


def expert_share_of(parameter: nn.Parameter) -> ExpertShare:
    """Return which experts of `parameter` this rank has: all if they are not divided."""
    share: ExpertShare = getattr(parameter, "expert_share", ExpertShare(0, 1))
    return share


def is_expert(parameter: nn.Parameter) -> bool:
    """Whether `parameter` is that of experts which expert-parallel ranks divide."""
    return hasattr(parameter, "expert_share")


InitialName = Literal["matrix", "residual", "vocabulary", "adapter", "constructed"]
Initial = InitialName | Callable[[Tensor], Tensor]
"""Initial values of a parameter; `megatron.model.initialization.initialise` draws them.

"matrix": normal, with the standard deviation of the network; "residual": the same divided by
sqrt(2 * num_layers), for projections into the residual stream; "vocabulary": as "matrix", rows of padding are 0;
"adapter": evenly distributed; "constructed": those that the constructor has set. A function computes the
values of a tensor of any shape from numbers that are evenly distributed between 0 and 1, each by itself.
"""


def mark_initial(parameter: nn.Parameter, values: Initial) -> nn.Parameter:
    """Mark how `parameter` is initialized; unmarked matrices are "matrix", others "constructed".

    Raises:
        ValueError: there are no such values.
    """
    if not callable(values) and values not in get_args(InitialName):
        raise ValueError(
            f"initial values {values!r}: expected one of {', '.join(get_args(InitialName))}"
        )
    parameter.initial = values  # type: ignore[attr-defined]
    return parameter


def mark_residual(parameter: nn.Parameter) -> nn.Parameter:
    """Mark `parameter` as a matrix whose product is added to the residual stream."""
    return mark_initial(parameter, "residual")


def mark_added(module: nn.Module) -> None:
    """Mark the parameters of `module` as added by a network to those of the network that it extends.

    They keep their initial values where a checkpoint has none of them.
    """
    for parameter in module.parameters():
        parameter.is_added = True  # type: ignore[attr-defined]


def is_added(parameter: nn.Parameter) -> bool:
    """Whether `parameter` is none of the network that this one extends."""
    return hasattr(parameter, "is_added")


def initial_of(parameter: nn.Parameter) -> Initial:
    """Return how `parameter` is initialized."""
    default: Initial = "matrix" if parameter.dim() > 1 else "constructed"
    values: Initial = getattr(parameter, "initial", default)
    return values


def layout_of(layer: Any) -> str:
    """Return how a layer with a group is divided, for its `extra_repr`."""
    divided = ", sequence_parallel=True" if layer.sequence_parallel else ""
    return f"tensor_parallel={layer.group.size()}{divided}"


def mark_replicated_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Mark the unsharded parameters, whose gradients are sums over the ranks that divide the sequence.

    Norms, biases after row-parallel layers and positions see other tokens on each of them. Experts
    that ranks divide in another way get the tokens of all.
    Source: arXiv:2205.05198, section 4.2.
    """
    for parameter in model.parameters():
        if shard_of(parameter) is None and not is_expert(parameter):
            mark_partial_gradient(parameter, group)
