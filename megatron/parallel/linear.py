"""Linear layers whose weight is divided over the tensor-parallel ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.parallel.regions import copy_to_tensor_parallel, reduce_from_tensor_parallel
from megatron.parallel.sharding import exact_quotient, sharded


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the output features divided over the tensor-parallel ranks.

    Args:
        in_features: width of x, the same on every rank.
        out_features: width of y over all ranks; a multiple of the group's size.
        group: the tensor-parallel ranks.
        has_bias: whether there is a bias at all.
        adds_bias: whether y has the bias already; if not it is left to the caller.

    Shapes: x [..., in_features] -> y [..., out_features / t], t the group's size.
    Communication: none forward; one all-reduce of x's gradient backward.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: dist.ProcessGroup,
        has_bias: bool = True,
        adds_bias: bool = True,
    ):
        super().__init__()
        self.group = group
        self.adds_bias = adds_bias
        local_features = exact_quotient(out_features, group.size(), "out_features")
        self.weight = sharded(nn.Parameter(torch.empty(local_features, in_features)), 0, group)
        bias = sharded(nn.Parameter(torch.zeros(local_features)), 0, group) if has_bias else None
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.adds_bias else None
        return F.linear(copy_to_tensor_parallel(x, self.group), self.weight, bias)


class RowParallelLinear(nn.Module):
    """y = x W^T with the input features divided over the tensor-parallel ranks.

    The bias, if there is one, is whole on every rank and is left to the caller, who adds it
    together with dropout and the residual.

    Args:
        in_features: width of x over all ranks; a multiple of the group's size.
        out_features: width of y, the same on every rank.
        group: the tensor-parallel ranks.
        has_bias: whether there is a bias.

    Shapes: x [..., in_features / t] -> y [..., out_features], t the group's size.
    Communication: one all-reduce of y forward; none backward.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: dist.ProcessGroup,
        has_bias: bool = True,
    ):
        super().__init__()
        self.group = group
        local_features = exact_quotient(in_features, group.size(), "in_features")
        self.weight = sharded(nn.Parameter(torch.empty(out_features, local_features)), 1, group)
        bias = nn.Parameter(torch.zeros(out_features)) if has_bias else None
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return reduce_from_tensor_parallel(F.linear(x, self.weight), self.group)
