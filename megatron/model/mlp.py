"""The MLP with its inner features divided over the tensor-parallel ranks."""

import torch.distributed as dist
from torch import Tensor, nn

from megatron.fused_kernels.dispatch import REFERENCE, Kernels
from megatron.parallel.linear import ColumnParallelLinear, RowParallelLinear


class ParallelMLP(nn.Module):
    """Widen, GELU, narrow; the output bias is left to the caller.

    GELU is the tanh form, 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).

    Args:
        hidden_size: width of the residual stream.
        ffn_hidden_size: inner width over all ranks; a multiple of the group's size.
        group: the tensor-parallel ranks.
        kernels: what computes the activation.

    Shapes: x_sbh [s, b, h] -> (y_sbh [s, b, h], bias [h]).
    Communication: one all-reduce of [s, b, h] over `group` forward, one backward.
    Source: arXiv:1606.08415, section 2.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        ffn_hidden_size: int,
        group: dist.ProcessGroup,
        kernels: Kernels = REFERENCE,
    ):
        super().__init__()
        self.kernels = kernels
        self.dense_h_to_4h = ColumnParallelLinear(
            hidden_size,
            ffn_hidden_size,
            group=group,
            adds_bias=not kernels.activation_adds_bias,
        )
        self.dense_4h_to_h = RowParallelLinear(ffn_hidden_size, hidden_size, group=group)

    def forward(self, x_sbh: Tensor) -> tuple[Tensor, Tensor]:
        bias_f = self.dense_h_to_4h.bias if self.kernels.activation_adds_bias else None
        inner_sbf = self.kernels.bias_gelu(self.dense_h_to_4h(x_sbh), bias_f, "tanh")
        return self.dense_4h_to_h(inner_sbf), self.dense_4h_to_h.bias
