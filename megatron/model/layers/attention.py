"""Self-attention and cross-attention with the heads divided over tensor-parallel ranks."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.network.model_spec import ModelSpec
from megatron.model.layers.attention_kernels import Attend, Mask, ScoreOptions
from megatron.model.layers.layer_input import Shared, once
from megatron.model.layers.mlp import adapter_of
from megatron.model.layers.norms import query_key_norms
from megatron.model.layers.parts import LayerParts, once_per_sequence
from megatron.model.layers.positions import (
    RelativePositions,
    alibi_slopes,
    own_position_embedding,
    rotary_tables,
)
from megatron.tensor_parallel.collectives import gather_sequence
from megatron.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron.tensor_parallel.sharding import exact_quotient, mark_sharded


class ParallelAttention(nn.Module):
    """Multi-head or grouped-query self-attention; the output bias is left to the caller.

    It is causal unless spans say what each token sees.

    Rows of the fused weight are grouped [groups, {queries of the group, key, value}, head_dim], so
    that the shards of any number of ranks, laid side by side, are the whole. With as many groups
    as heads that is [heads, {q, k, v}, head_dim].

    Args:
        spec: the network; its query groups are a multiple of the group's size, or divide it: then
            several ranks have the same keys and values, each for queries of its own.
        parts: what its layers are built with.
        number: the layer's, from 1 on.

    Shapes: x_sbh [s, b, h], positions_bs [b, s] with rotary positions, spans_bs2 [b, s, 2] or
        [b, 1, 2] or None -> (y_sbh [s, b, h], bias [h] or None).
    Communication: one all-reduce of [s, b, h] over `group` forward, one backward. With fewer query
        groups than ranks also an all-gather of the projections forward, a reduce-scatter backward.
    Randomness: dropout draws from `rng`: every rank drops weights of its own heads.
    Source: arXiv:1706.03762, section 3.2; arXiv:2305.13245 for groups of queries;
        arXiv:2302.05442, section 2, for norms of queries and keys; arXiv:2508.10925, section 2.2,
        for learned attention sinks.
    """

    def __init__(self, spec: ModelSpec, parts: LayerParts, *, number: int = 1):
        super().__init__()
        attention = spec.attention
        heads, groups = attention.num_attention_heads, attention.num_query_groups
        self.spec, self.parts, self.kernels = spec, parts, parts.kernels
        self.group, self.rng = parts.group, parts.rng
        ranks = parts.group.size()
        # Ranks with the same keys and values, if there are more ranks than groups.
        self.ranks_per_group = exact_quotient(max(groups, ranks), groups, "tensor-parallel size")
        self.local_groups = exact_quotient(max(groups, ranks), ranks, "num_query_groups")
        self.queries_per_group = exact_quotient(heads, max(groups, ranks), "num_attention_heads")
        self.layer_scaling = float(number) if attention.query_key_layer_scaling else 1.0
        self.window = attention.window_of(number)
        self.positions = spec.positions_of(number)
        self.own_positions = own_position_embedding(spec, number=number)
        self.core_attention = self.build_core(number)
        self.build_inputs()
        if attention.softmax_type == "learnable":
            sinks = torch.zeros(self.local_groups * self.queries_per_group)
            self.sinks = mark_sharded(nn.Parameter(sinks), 0, parts.group)
        self.dense = RowParallelLinear(
            heads * spec.value_dim,
            spec.hidden_size,
            has_bias=spec.attention_output_bias,
            adapter=adapter_of(spec, "dense", parts.rng),
            product=parts.kernels.linear,
            **parts.division,
        )
        if spec.norm.qk_layernorm:
            self.build_norms()

    def build_core(self, number: int) -> Attend:
        """Return the core attention kernel."""
        return self.parts.self_attention(
            number, groups=self.local_groups, head_dim=self.spec.attention.head_dim
        )

    def build_inputs(self) -> None:
        """Build the linear layer before the core."""
        attention = self.spec.attention
        self.query_key_value = self.input_layer(
            attention.query_features + 2 * attention.key_features
        )
        reads_product = self.ranks_per_group == 1 and not self.spec.norm.qk_layernorm
        self.query_key_value.sums_bias = not (reads_product and self.kernels.split_sums_bias)

    def build_norms(self) -> None:
        """Build the norms of queries and keys."""
        norms = query_key_norms(self.spec, self.group, self.kernels)
        self.q_layernorm, self.k_layernorm = norms

    def input_layer(self, features: int) -> ColumnParallelLinear:
        """Build a column-parallel layer that projects its input to `features` of heads."""
        return ColumnParallelLinear(
            self.spec.hidden_size,
            features,
            has_bias=self.spec.attention.qkv_bias,
            adapter=adapter_of(self.spec, "query_key_value", self.rng),
            product=self.kernels.linear,
            **self.parts.division,
        )

    def forward(
        self,
        x_sbh: Tensor,
        positions_bs: Tensor | None = None,
        spans_bs2: Tensor | None = None,
        relative: RelativePositions | None = None,
        *,
        shared: Shared | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        shared = {} if shared is None else shared
        own, tables = self.positions, None
        if positions_bs is not None and own.rotary_dim:
            tables = once(shared, ("rotary", own), lambda: rotary_tables(positions_bs, own))
        query, key, value = self.project(x_sbh, tables)
        if self.own_positions and positions_bs is not None:
            query, key = self.own_positions.turn(query, key, positions_bs)
        bias = None
        if relative and self.parts.states is None:  # else a KV cache, which has further keys
            by_distance = self.kernels.attention == "flex"
            compute = relative.by_distance if by_distance else relative.bias
            bias, relative = compute(query.size(2), key.size(2)), None
        window = self.window
        mask = once(shared, ("mask", window), lambda: Mask(spans_bs2=spans_bs2, window=window))
        slopes_a = None
        if self.spec.positions.position_embedding == "alibi":
            slopes_a = once(shared, "ALiBi slopes", lambda: self._slopes(query.device))
        return self.output(
            self.core(query, key, value, mask, bias=bias, slopes_a=slopes_a, relative=relative)
        )

    def output(self, mixed: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output layer's product with the mixed values [b, a, s, d], and its bias."""
        return self.dense(mixed.permute(2, 0, 1, 3).flatten(2)), self.dense.bias

    def project(
        self, x_sbh: Tensor, tables: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query [b, a, s, d], key and value [b, g, s, d] of this rank.

        Args:
            tables: of rotary positions; None for none.
        """
        queries, product = self.queries_per_group, self.query_key_value
        qkv = self._own_heads(product(x_sbh))
        qkv = qkv.unflatten(2, (self.local_groups, queries + 2, self.spec.attention.head_dim))
        if not self.spec.norm.qk_layernorm:
            # After the product, which releases its weights under ZeRO-3; reading gathers them again.
            bias = None if product.sums_bias else product.bias
            return self.kernels.split_heads(qkv, bias, tables)
        query, key, value = self.in_heads(*qkv.split([queries, 1, 1], dim=3))
        if tables:
            query, key = (self.kernels.rotary(x, *tables) for x in (query, key))
        return query, key, value

    def _own_heads(self, features: Tensor) -> Tensor:
        """Return projections [s, b, {own queries, key, value}] of a rank with fewer features than a group.

        Ranks divide the rows of the fused weight evenly, so those of a group are on several ranks.

        Communication: with more ranks than groups one all-gather of [s, b, features] forward, one
            reduce-scatter backward.
        """
        shared = self.ranks_per_group
        if shared == 1:
            return features
        group, number = divmod(self.group.rank(), shared)
        full = gather_sequence(features, 2, self.group)
        of_group = full.chunk(self.group.size() // shared, 2)[group]
        keys = 2 * self.spec.attention.head_dim
        queries, key_value = of_group.tensor_split([of_group.size(2) - keys], 2)
        # In cross-attention there are no queries.
        return torch.cat([queries.chunk(shared, 2)[number], key_value], 2)

    def in_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Transpose projections [s, b, groups, heads of each, d] to [b, heads, s, d]; norm them."""
        norm = self.spec.norm
        if norm.qk_norm_across_heads:
            query = self.q_layernorm(query.flatten(2)).view_as(query)
            key = self.k_layernorm(key.flatten(2)).view_as(key)
        query, key, value = (x.flatten(2, 3).permute(1, 2, 0, 3) for x in (query, key, value))
        if norm.qk_layernorm and not norm.qk_norm_across_heads:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return query, key, value

    def core(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask,
        *,
        bias: Tensor | None = None,
        slopes_a: Tensor | None = None,
        relative: RelativePositions | None = None,
    ) -> Tensor:
        """Compute core attention, between the linear layers: the mixed values [b, a, s, d]."""
        how = self.score_options(query, mask, bias=bias, slopes_a=slopes_a, relative=relative)
        with self.rng.fork() if how.dropout else nullcontext():
            return self.core_attention(query, key, value, how)

    def score_options(self, query: Tensor, mask: Mask, **biases: Any) -> ScoreOptions:
        """Return how scores are computed; `biases` are bias, slopes_a and relative of ScoreOptions."""
        return ScoreOptions(
            mask=mask,
            scale=self.spec.attention.scale,
            softcap=self.spec.attention.attention_softcap,
            sinks_a=self._sinks(query),
            layer_scaling=self.layer_scaling,
            dropout=self.spec.attention.attention_dropout if self.training else 0.0,
            kernels=self.kernels,
            **biases,
        )

    def _sinks(self, query: Tensor) -> Tensor | None:
        """Return the attention sinks of this rank's heads; None for ordinary softmax."""
        match self.spec.attention.softmax_type:
            case "learnable":
                return self.sinks
            case "off-by-one":
                return query.new_zeros(query.size(1))
        return None

    def _slopes(self, device: torch.device) -> Tensor:
        """Return the ALiBi slopes of this rank's heads."""
        slopes_a = alibi_slopes(self.spec.attention.num_attention_heads, device)
        return slopes_a.chunk(self.group.size())[self.group.rank()]

    def extra_repr(self) -> str:
        """Return the heads over all ranks, and how they are divided."""
        attention, ranks = self.spec.attention, self.group.size()
        heads = f"heads={attention.num_attention_heads}, query_groups={attention.num_query_groups}"
        window = f", window={self.window}" if self.window else ""
        return f"{heads}, head_dim={attention.head_dim}{window}, tensor_parallel={ranks}"


@dataclass(frozen=True)
class Regrouping:
    """Reshuffle of full sequences between the linear layers of cross-attention.

    With sequence parallelism, each rank has all positions of its heads between these layers.

    Args:
        queries: of projected queries [s, b, w], to [m, n, w].
        context: of projected keys and values [t, b', w], to [t', n, w].
        output: of mixed values [m, n, w], to [s, b, w].
    """

    queries: Callable[[Tensor], Tensor]
    context: Callable[[Tensor], Tensor]
    output: Callable[[Tensor], Tensor]


def keep(x: Tensor) -> Tensor:
    """Return `x` as it is."""
    return x


_AS_IT_IS = Regrouping(keep, keep, keep)


class ParallelCrossAttention(ParallelAttention):
    """Cross-attention: queries of a decoder, keys and values of an encoder's output.

    Rows of the fused weight of keys and values are grouped [groups, {key, value}, head_dim]. In
    generation keys and values are computed in prefill, and kept.

    Args:
        contexts: number of texts that a sequence attends to, and tokens of each with padding, if
            that is the same for all.

    Shapes: x_sbh [s, b, h], encoder_tbh [t, b, h], spans_bs2 [b, 1, 2] of positions of the encoder
        -> (y_sbh [s, b, h], bias [h] or None). Spans are of what `regrouping` makes of them.
    Communication: forward one all-reduce of [s, b, h] over `group`; backward one of [s, b, h] and
        one of [t, b, h].
    """

    def __init__(
        self,
        spec: ModelSpec,
        parts: LayerParts,
        *,
        number: int = 1,
        contexts: tuple[int, int | None] = (1, None),
    ):
        super().__init__(spec, parts, number=number)
        self.num_contexts = contexts[0]
        self.projected = parts.state(*contexts, 2 * self.local_groups * spec.attention.head_dim)

    def build_core(self, number: int) -> Attend:
        """Return the core attention kernel."""
        return self.parts.core_attention(number)

    def build_inputs(self) -> None:
        """Build the linear layers before the core."""
        self.query = self.input_layer(self.spec.attention.query_features)
        self.key_value = self.input_layer(2 * self.spec.attention.key_features)

    def project_context(self, encoder_tbh: Tensor) -> Tensor:
        """Return keys and values [t, b, 2 * g * d] of an encoder's output; in decode steps kept ones."""
        if self.projected is None:
            return self._own_heads(self.key_value(encoder_tbh))

        def by_sequence() -> Tensor:
            projected = self._own_heads(self.key_value(encoder_tbh))
            return projected.transpose(0, 1).unflatten(0, (-1, self.num_contexts))

        return once_per_sequence(self.projected, by_sequence).flatten(0, 1).transpose(0, 1)

    def forward(  # type: ignore[override]
        self,
        x_sbh: Tensor,
        encoder_tbh: Tensor,
        spans_bs2: Tensor | None,
        *,
        shared: Shared | None = None,
        regrouping: Regrouping = _AS_IT_IS,
    ) -> tuple[Tensor, Tensor | None]:
        head_dim, groups = self.spec.attention.head_dim, self.local_groups
        query = regrouping.queries(self.query(x_sbh))
        query = query.unflatten(2, (groups, self.queries_per_group, head_dim))
        key_value = regrouping.context(self.project_context(encoder_tbh))
        key_value = key_value.unflatten(2, (groups, 2, head_dim))
        query, key, value = self.in_heads(query, *key_value.split(1, dim=3))
        mask = once(
            {} if shared is None else shared,
            "mask of encoder",
            lambda: Mask(causal=False, spans_bs2=spans_bs2),
        )
        mixed = self.core(query, key, value, mask).permute(2, 0, 1, 3).flatten(2)
        return self.dense(regrouping.output(mixed)), self.dense.bias
