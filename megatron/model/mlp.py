"""The MLP with its inner features divided over the tensor-parallel ranks."""

import torch.distributed as dist
from torch import Tensor, nn

from megatron.fused_kernels.dispatch import REFERENCE, Kernels
from megatron.model.activations import activation_of
from megatron.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron.plan.model_spec import ModelSpec


class ParallelMLP(nn.Module):
    """Widen, activate, narrow; the output bias is left to the caller.

    Rows of a gated MLP's first weight are grouped [features, {gate, up}], so that the shards of
    any number of ranks, laid side by side, are the whole.

    Args:
        spec: the network; its inner width is a multiple of the group's size.
        group: the tensor-parallel ranks.
        kernels: what computes the activation.

    Shapes: x_sbh [s, b, h] -> (y_sbh [s, b, h], bias [h] or None).
    Communication: one all-reduce of [s, b, h] over `group` forward, one backward.
    """

    def __init__(self, spec: ModelSpec, *, group: dist.ProcessGroup, kernels: Kernels = REFERENCE):
        super().__init__()
        inner = spec.ffn_hidden_size * (2 if spec.is_gated else 1)
        self.activate = activation_of(spec.activation, kernels)
        self.dense_h_to_4h = ColumnParallelLinear(
            spec.hidden_size,
            inner,
            group=group,
            has_bias=spec.linear_bias,
            adds_bias=not kernels.activation_adds_bias,
        )
        self.dense_4h_to_h = RowParallelLinear(
            spec.ffn_hidden_size, spec.hidden_size, group=group, has_bias=spec.linear_bias
        )

    def forward(self, x_sbh: Tensor) -> tuple[Tensor, Tensor | None]:
        inner_sbf = self.dense_h_to_4h(x_sbh)
        # Behind the product, which lets go of its weights under ZeRO-3; asking brings them back.
        bias_f = None if self.dense_h_to_4h.adds_bias else self.dense_h_to_4h.bias
        inner_sbf = self.activate(inner_sbf, bias_f)
        return self.dense_4h_to_h(inner_sbf), self.dense_4h_to_h.bias
