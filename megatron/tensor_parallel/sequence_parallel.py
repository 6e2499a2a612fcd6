"""Sequence parallelism: tensor-parallel ranks divide the sequence between tensor-parallel regions.

There the ranks would all compute the same: norms, dropout, residuals. Each takes its part of the
positions instead; a region begins with an all-gather and ends with a reduce-scatter, which
together move as much as the all-reduce that they replace.
Source: arXiv:2205.05198, section 4.2.
"""

import torch.distributed as dist
from torch import nn

from megatron.tensor_parallel.embedding import VocabParallelEmbedding
from megatron.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron.tensor_parallel.sharding import all_reduce_grad, shard_of


def divide_sequence(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Let the ranks of `group` divide the sequence in `model`, a stage or the whole.

    What they all hold whole (norms, biases behind row-parallel layers, positions) then sees a part
    of the tokens on each of them, so its gradient becomes the sum over the ranks.

    Communication: that of the layers; in backward one all-reduce for each whole parameter.
    """
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding):
            module.sequence_parallel = True
    for parameter in model.parameters():
        if shard_of(parameter) is None:
            all_reduce_grad(parameter, group)
