"""Self-attention, causal unless told what tokens see, with the heads divided over tensor ranks."""

from contextlib import nullcontext

import torch.distributed as dist
from torch import Tensor, nn

from megatron.config.network.model_spec import ModelSpec
from megatron.fused_kernels.reference.dispatch import REFERENCE, Kernels
from megatron.model.layers.attention_kernels import Attend, Mask, Weighing
from megatron.model.layers.mlp import adapter_of
from megatron.model.layers.norms import norm_layer
from megatron.model.layers.positions import alibi_slopes, own_position_embedding, rotary_tables
from megatron.tensor_parallel.adapters import column_parallel, row_parallel
from megatron.tensor_parallel.rng import RngTracker
from megatron.tensor_parallel.sharding import exact_quotient


class ParallelAttention(nn.Module):
    """Multi-head or grouped-query attention; the output bias is left to the caller.

    Rows of the fused weight are grouped [groups, {queries of the group, key, value}, head_dim], so
    that the shards of any number of ranks, laid side by side, are the whole. With as many groups
    as heads that is [heads, {q, k, v}, head_dim].

    Args:
        spec: the network; its query groups are a multiple of the group's size.
        number: the layer's, from 1 on.
        group: the tensor-parallel ranks.
        rng: the stream that differs between them.
        core_attention: computes attention between the linear layers.
        kernels: what computes the rest.
        sequence_parallel: whether the ranks of `group` divide the sequence between layers.

    Shapes: x_sbh [s, b, h], positions_bs [b, s] with rotary positions, spans_bs2 [b, s, 2] or None
        -> (y_sbh [s, b, h], bias [h] or None).
    Communication: one all-reduce of [s, b, h] over `group` forward, one backward.
    Randomness: dropout draws from `rng`: every rank drops weights of its own heads.
    Source: arXiv:1706.03762, section 3.2; arXiv:2305.13245 for groups of queries;
        arXiv:2302.05442, section 2, for norms of queries and keys.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        number: int = 1,
        group: dist.ProcessGroup,
        rng: RngTracker,
        core_attention: Attend,
        kernels: Kernels = REFERENCE,
        sequence_parallel: bool = False,
    ):
        super().__init__()
        heads, groups, head_dim = spec.num_attention_heads, spec.num_query_groups, spec.head_dim
        self.spec, self.group, self.rng, self.kernels = spec, group, rng, kernels
        self.local_groups = exact_quotient(groups, group.size(), "num_query_groups")
        self.queries_per_group = exact_quotient(heads, groups, "num_attention_heads")
        self.layer_scaling = float(number) if spec.query_key_layer_scaling else 1.0
        self.window = spec.window_of(number)
        self.positions = spec.positions_of(number)
        self.own_positions = own_position_embedding(spec, number=number)
        self.core_attention = core_attention
        self.query_key_value = column_parallel(
            spec.hidden_size,
            (heads + 2 * groups) * head_dim,
            group=group,
            has_bias=spec.qkv_bias,
            sequence_parallel=sequence_parallel,
            adapter=adapter_of(spec, "query_key_value", rng),
        )
        self.dense = row_parallel(
            heads * head_dim,
            spec.hidden_size,
            group=group,
            has_bias=spec.attention_output_bias,
            sequence_parallel=sequence_parallel,
            adapter=adapter_of(spec, "dense", rng),
        )
        if spec.qk_layernorm:
            # Every rank norms heads of its own with the same weight.
            norm = norm_layer(spec, width=head_dim, group=group, kernels=kernels)
            self.q_layernorm, self.k_layernorm = norm.build(), norm.build()

    def forward(
        self, x_sbh: Tensor, positions_bs: Tensor | None = None, spans_bs2: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = self.project(x_sbh)
        if self.own_positions and positions_bs is not None:
            query, key = self.own_positions.turn(query, key, positions_bs)
        elif positions_bs is not None:
            cos, sin = rotary_tables(positions_bs, self.positions)
            query, key = (self.kernels.rotary(x, cos, sin) for x in (query, key))
        mixed = self.core(query, key, value, spans_bs2)
        return self.dense(mixed.permute(2, 0, 1, 3).flatten(2)), self.dense.bias

    def project(self, x_sbh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query [b, a, s, d], key and value [b, g, s, d] of this rank."""
        queries = self.queries_per_group
        qkv = self.query_key_value(x_sbh)
        qkv = qkv.unflatten(2, (self.local_groups, queries + 2, self.spec.head_dim))
        query, key, value = qkv.split([queries, 1, 1], dim=3)
        query, key, value = (x.flatten(2, 3).permute(1, 2, 0, 3) for x in (query, key, value))
        if self.spec.qk_layernorm:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return query, key, value

    def core(self, query: Tensor, key: Tensor, value: Tensor, spans_bs2: Tensor | None) -> Tensor:
        """Return the mixed values [b, a, s, d]: what is between the two linear layers."""
        drop = self.spec.attention_dropout if self.training else 0.0
        with self.rng.fork() if drop else nullcontext():
            return self.core_attention(
                query,
                key,
                value,
                Weighing(
                    mask=Mask(spans_bs2=spans_bs2, window=self.window),
                    scale=self.spec.attention_scale,
                    softcap=self.spec.attention_softcap,
                    slopes_a=self._slopes(query),
                    layer_scaling=self.layer_scaling,
                    dropout=drop,
                    kernels=self.kernels,
                ),
            )

    def _slopes(self, query: Tensor) -> Tensor | None:
        if self.spec.position_embedding != "alibi":
            return None
        slopes_a = alibi_slopes(self.spec.num_attention_heads, query.device)
        return slopes_a.chunk(self.group.size())[self.group.rank()]

    def extra_repr(self) -> str:
        """Return the heads over all ranks, and how they are divided."""
        spec, ranks = self.spec, self.group.size()
        heads = f"heads={spec.num_attention_heads}, query_groups={spec.num_query_groups}"
        window = f", window={self.window}" if self.window else ""
        return f"{heads}, head_dim={spec.head_dim}{window}, tensor_parallel={ranks}"
