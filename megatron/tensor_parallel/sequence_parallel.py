"""Sequence parallelism: tensor-parallel ranks divide the sequence between tensor-parallel regions.

There the ranks would all compute the same: norms, dropout, residuals. Each takes its part of the
positions instead; a region begins with an all-gather and ends with a reduce-scatter, which
together move as much as the all-reduce that they replace.
Source: arXiv:2205.05198, section 4.2.
"""

import torch.distributed as dist
from torch import nn

from megatron.tensor_parallel.sharding import all_reduce_grad, shard_of


def all_reduce_replicated_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum the gradients of unsharded parameters over the ranks that divide the sequence.

    Norms, biases behind row-parallel layers and positions see other tokens on each of them.

    Communication: in backward one all-reduce for each unsharded parameter.
    """
    for parameter in model.parameters():
        if shard_of(parameter) is None:
            all_reduce_grad(parameter, group)
