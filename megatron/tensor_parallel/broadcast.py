"""A batch, from the rank that read it to those that share its layers."""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.tensor_parallel.process_groups import Groups


def broadcast_tokens(
    tokens: Tensor | None, shape: tuple[int, ...], groups: Groups, device: torch.device
) -> Tensor:
    """Return tensor rank 0's `tokens` on every rank that shares its layers.

    Args:
        tokens: [b, s + 1] int64, or with more numbers a token, on tensor rank 0; ignored elsewhere.
        shape: of `tokens`, known to all ranks.

    Communication: one broadcast of `shape` over the tensor group.
    """
    if groups.tensor_rank == 0 and tokens is not None:
        tokens = tokens.to(device)
    else:
        tokens = torch.empty(shape, dtype=torch.int64, device=device)
    if groups.topology.tensor > 1:
        dist.broadcast(tokens, group=groups.tensor, group_src=0)
    return tokens
