"""What marks a parameter as one shard of a larger one, and how sizes are divided."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import nn


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


def sharded(parameter: nn.Parameter, dim: int, group: dist.ProcessGroup) -> nn.Parameter:
    """Mark `parameter` as this rank's piece of what `group` holds together along `dim`.

    DeepSpeed's gradient norm reads `tensor_model_parallel`: without the mark a parameter counts
    as a copy that every tensor-parallel rank holds.
    """
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.shard = Shard(dim, group.rank(), group.size())  # type: ignore[attr-defined]
    return parameter


def shard_of(parameter: nn.Parameter) -> Shard | None:
    """Return which piece `parameter` is; None for one that is whole on every rank."""
    return getattr(parameter, "shard", None)
