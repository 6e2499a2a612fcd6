"""The gradient's norm where DeepSpeed keeps none: 32-bit training without ZeRO."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from megatron.parallel.groups import Groups
from megatron.parallel.sharding import shard_of


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], groups: Groups, max_norm: float) -> float:
    """Scale the gradients down so that their norm over a whole replica is at most `max_norm`.

    DeepSpeed's own function counts a weight that two stages share twice.

    Returns:
        The norm before scaling.

    Communication: one all-reduce of a scalar over the replica.
    """
    held = [(p, p.grad) for p in parameters if p.grad is not None]
    counted = [grad for p, grad in held if counts_here(p, groups)]
    norms = torch._foreach_norm(counted)
    squared = torch.stack([norm.float().square() for norm in norms]).sum()
    dist.all_reduce(squared, group=groups.model)
    norm = float(squared.sqrt())
    scale = max_norm / (norm + 1e-6)
    if scale < 1:
        torch._foreach_mul_([grad for _, grad in held], scale)
    return norm


def counts_here(parameter: nn.Parameter, groups: Groups) -> bool:
    """Whether this rank adds `parameter` to the norm, so that each weight is added once."""
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return shard_of(parameter) is not None or groups.tensor_rank == 0
