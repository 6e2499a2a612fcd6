"""One transformer layer: attention and MLP, each behind a norm and beside a residual."""

import torch.distributed as dist
from torch import nn

from megatron.fused_kernels.dispatch import REFERENCE, Kernels
from megatron.model.attention import ParallelAttention
from megatron.model.carry import Carried, pack, unpack
from megatron.model.mlp import ParallelMLP
from megatron.model.norms import LayerNorm
from megatron.parallel.random import RngTracker
from megatron.plan.model_spec import ModelSpec


class ParallelTransformerLayerPipe(nn.Module):
    """x + dropout(attention(norm(x))), then the same with the MLP.

    Attention is causal, unless spans of what tokens see come with x_sbh; they are passed on.

    Shapes: x_sbh [s, b, h] -> [s, b, h].
    Communication: two all-reduces of [s, b, h] over `group` forward, two backward.
    Randomness: residual dropout draws from the ordinary stream, attention from `rng`.
    """

    def __init__(
        self,
        *,
        spec: ModelSpec,
        group: dist.ProcessGroup,
        rng: RngTracker,
        kernels: Kernels = REFERENCE,
    ):
        super().__init__()
        width, eps = spec.hidden_size, spec.layernorm_epsilon
        self.hidden_dropout = spec.hidden_dropout
        self.kernels = kernels
        self.input_layernorm = LayerNorm(width, eps=eps, kernels=kernels)
        self.self_attention = ParallelAttention(
            width,
            num_heads=spec.num_attention_heads,
            head_dim=spec.head_dim,
            dropout=spec.attention_dropout,
            group=group,
            rng=rng,
            kernels=kernels,
        )
        self.post_attention_layernorm = LayerNorm(width, eps=eps, kernels=kernels)
        self.mlp = ParallelMLP(
            width, ffn_hidden_size=spec.ffn_hidden_size, group=group, kernels=kernels
        )

    def forward(self, inputs: Carried) -> Carried:
        x_sbh, spans_bs2 = unpack(inputs)
        y_sbh, bias = self.self_attention(self.input_layernorm(x_sbh), spans_bs2)
        add = self.kernels.bias_dropout_add
        x_sbh = add(y_sbh, bias, x_sbh, self.hidden_dropout, self.training)
        y_sbh, bias = self.mlp(self.post_attention_layernorm(x_sbh))
        x_sbh = add(y_sbh, bias, x_sbh, self.hidden_dropout, self.training)
        return pack(x_sbh, spans_bs2)
