"""Sequence parallelism: tensor-parallel ranks divide the sequence between tensor-parallel regions.

There the ranks would all compute the same: norms, dropout, residuals. Each takes its part of the
positions instead; a region begins with an all-gather and ends with a reduce-scatter, which
together move as much as the all-reduce that they replace.
Source: arXiv:2205.05198, section 4.2.
"""

import torch.distributed as dist
from torch import nn

from megatron.tensor_parallel.sharding import mark_partial_gradient, shard_of


def mark_replicated_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Mark the unsharded parameters, whose gradients are sums over the ranks that divide the sequence.

    Norms, biases behind row-parallel layers and positions see other tokens on each of them.
    """
    for parameter in model.parameters():
        if shard_of(parameter) is None:
            mark_partial_gradient(parameter, group)
