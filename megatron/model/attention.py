"""Self-attention, causal unless told what tokens see, with the heads divided over tensor ranks."""

from contextlib import nullcontext

import torch.distributed as dist
from torch import Tensor, nn

from megatron.fused_kernels.dispatch import REFERENCE, Kernels
from megatron.model.scores import Mask, attention_of
from megatron.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.random import RngTracker
from megatron.parallel.sharding import exact_quotient


class ParallelAttention(nn.Module):
    """Multi-head attention; the output bias is left to the caller.

    Rows of the fused weight are grouped [heads, {q, k, v}, head_dim], so that the shards of any
    number of ranks, laid side by side, are the whole.

    Args:
        hidden_size: width of the residual stream.
        num_heads: heads over all ranks; a multiple of the group's size.
        head_dim: features per head.
        dropout: probability that an attention weight is dropped.
        group: the tensor-parallel ranks.
        rng: the stream that differs between them.
        kernels: what computes it.

    Shapes: x_sbh [s, b, h], spans_bs2 [b, s, 2] or None -> (y_sbh [s, b, h], bias [h]).
    Communication: one all-reduce of [s, b, h] over `group` forward, one backward.
    Randomness: dropout draws from `rng`: every rank drops weights of its own heads.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        head_dim: int,
        dropout: float,
        group: dist.ProcessGroup,
        rng: RngTracker,
        kernels: Kernels = REFERENCE,
    ):
        super().__init__()
        self.local_heads = exact_quotient(num_heads, group.size(), "num_heads")
        self.head_dim = head_dim
        self.dropout = dropout
        self.rng = rng
        self.attend = attention_of(kernels)
        width = num_heads * head_dim
        self.query_key_value = ColumnParallelLinear(hidden_size, 3 * width, group=group)
        self.dense = RowParallelLinear(width, hidden_size, group=group)

    def forward(self, x_sbh: Tensor, spans_bs2: Tensor | None = None) -> tuple[Tensor, Tensor]:
        s, b, _ = x_sbh.shape
        qkv = self.query_key_value(x_sbh).view(s, b, self.local_heads, 3, self.head_dim)
        query, key, value = qkv.permute(3, 1, 2, 0, 4)  # each [b, heads, s, head_dim]
        drop = self.dropout if self.training else 0.0
        with self.rng.fork() if drop else nullcontext():
            mixed = self.attend(
                query,
                key,
                value,
                mask=Mask(spans_bs2=spans_bs2),
                scale=self.head_dim**-0.5,
                dropout=drop,
            )
        mixed_sbh = mixed.permute(2, 0, 1, 3).reshape(s, b, self.local_heads * self.head_dim)
        return self.dense(mixed_sbh), self.dense.bias
