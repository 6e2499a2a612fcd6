"""What marks a parameter as one shard of a larger one, and how sizes are divided."""

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Shard:
    """Which piece of a whole a tensor is: number `index` of `count` equal ones along `dim`."""

    dim: int
    index: int
    count: int


def exact_quotient(whole: int, parts: int, name: str) -> int:
    """Return whole / parts.

    Raises:
        ValueError: `name` does not divide evenly.
    """
    if whole % parts:
        raise ValueError(f"{name} {whole} is not a multiple of {parts}")
    return whole // parts


def mark_sharded(parameter: nn.Parameter, dim: int, group: dist.ProcessGroup) -> nn.Parameter:
    """Mark `parameter` as this rank's piece of what `group` holds together along `dim`.

    DeepSpeed's gradient norm reads `tensor_model_parallel`: without the mark a parameter counts
    as a copy that every tensor-parallel rank holds.
    """
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.shard = Shard(dim, group.rank(), group.size())  # type: ignore[attr-defined]
    return parameter


def all_reduce_grad(parameter: nn.Parameter, group: dist.ProcessGroup) -> nn.Parameter:
    """Let the gradient of `parameter` be the sum over `group` of what its ranks find.

    For a weight that is whole on every rank while each computes another part with it: other heads,
    or other positions of the sequence.

    Communication: one all-reduce of the gradient in every backward pass.
    """
    if group.size() > 1 and not is_grad_reduced(parameter):
        parameter.is_grad_reduced = True  # type: ignore[attr-defined]
        parameter.register_hook(partial(_sum, group=group))
    return parameter


def is_grad_reduced(parameter: nn.Parameter) -> bool:
    """Return whether `all_reduce_grad` has taken care of the gradient."""
    return getattr(parameter, "is_grad_reduced", False)


def _sum(grad: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    # In at least 32 bits, so that a 16-bit gradient is rounded once.
    wide = torch.promote_types(grad.dtype, torch.float32)
    total = grad.to(wide, memory_format=torch.contiguous_format, copy=True)
    dist.all_reduce(total, group=group)
    return total.to(grad.dtype)


def shard_of(parameter: nn.Parameter) -> Shard | None:
    """Return which piece `parameter` is; None for one that is whole on every rank."""
    return getattr(parameter, "shard", None)


_NUMBER = re.compile(r"(?<=\.deepspeed_experts\.)\d+(?=\.)")


@dataclass(frozen=True)
class ExpertShare:
    """Which expert a parameter belongs to, and how many replicas share the experts of its layer.

    Neighbouring replicas share them, from the first one on; then the experts begin anew.
    """

    number: int
    replicas: int


def mark_expert(parameter: nn.Parameter, share: ExpertShare) -> None:
    """Mark `parameter` as one of an expert's."""
    parameter.expert_share = share  # type: ignore[attr-defined]


def replicas_that_differ(parameter: nn.Parameter) -> int:
    """Return how many replicas in a row hold different values of `parameter`: 1 but for experts."""
    share: ExpertShare | None = getattr(parameter, "expert_share", None)
    return share.replicas if share else 1


def is_expert(parameter: nn.Parameter) -> bool:
    """Whether `parameter` is one of an expert's."""
    return hasattr(parameter, "expert_share")


def full_name(name: str, parameter: nn.Parameter) -> str:
    """Return the name that `parameter` has where one rank holds all experts of a layer."""
    share: ExpertShare | None = getattr(parameter, "expert_share", None)
    return _NUMBER.sub(str(share.number), name) if share else name


def layout_of(layer: Any) -> str:
    """Return how a layer with a group is divided, for its `extra_repr`."""
    divided = ", sequence_parallel=True" if layer.sequence_parallel else ""
    return f"tensor_parallel={layer.group.size()}{divided}"
