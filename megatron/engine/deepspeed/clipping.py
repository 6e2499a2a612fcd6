"""The gradient's norm where DeepSpeed keeps none: 32-bit training without ZeRO."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.engine.deepspeed.replicated_weights import counts_here, nan_unless_finite
from megatron.tensor_parallel.process_groups import Groups
from megatron.tensor_parallel.sharding import is_expert, replicas_that_differ


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], groups: Groups, max_norm: float) -> float:
    """Scale the gradients down so that their norm over the whole network is at most `max_norm`.

    The network is a replica, and with it the experts of its neighbours. DeepSpeed's own function
    counts a weight that two stages share twice.

    Returns:
        The norm before scaling.

    Communication: one all-reduce of a scalar over the replica; with experts one more, and one
    over the replicas.
    """
    held = [(p, p.grad) for p in parameters if p.grad is not None]
    device = held[0][1].device
    counted = [(p, grad) for p, grad in held if counts_here(p, groups)]
    squared = _squared_norm([grad for p, grad in counted if not is_expert(p)], device)
    squared += nan_unless_finite([grad for p, grad in held if not counts_here(p, groups)], device)
    dist.all_reduce(squared, group=groups.model)
    if any(is_expert(p) for p, _ in held):
        experts = [
            grad
            for p, grad in counted
            if is_expert(p) and groups.data_rank < replicas_that_differ(p)
        ]
        of_experts = _squared_norm(experts, device)
        dist.all_reduce(of_experts, group=groups.model)
        dist.all_reduce(of_experts, group=groups.data)
        squared += of_experts
    norm = float(squared.sqrt())
    scale = max_norm / (norm + 1e-6)
    if scale < 1:
        torch._foreach_mul_([grad for _, grad in held], scale)
    return norm


def _squared_norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    """Return the square of their norm in 32 bits."""
    if not gradients:
        return torch.zeros((), device=device)
    return torch.stack([norm.float().square() for norm in torch._foreach_norm(gradients)]).sum()
