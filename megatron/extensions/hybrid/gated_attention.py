"""Attention with an output gate: each feature of a head's output is multiplied by a sigmoid."""

from typing import Any

from torch import Tensor

from megatron.model.layers.attention import ParallelAttention
from megatron.model.layers.attention_kernels import Mask


class GatedAttention(ParallelAttention):
    """Self-attention whose output is multiplied by the sigmoid of a projection of its input.

    Rows of the fused weight are grouped [groups, {queries of the group, their gates, key, value},
    head_dim], so that the shards of any number of ranks, side by side, are the full weight. The
    tensor-parallel size divides the query groups.

    Shapes: as in ParallelAttention.
    Source: arXiv:2505.06708, section 2.2.
    """

    def build_inputs(self) -> None:
        """Build the linear layer before the core."""
        attention = self.spec.attention
        self.query_key_value = self.input_layer(
            2 * attention.query_features + 2 * attention.key_features
        )

    def project(
        self, x_sbh: Tensor, tables: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query [b, a, s, d], key [b, g, s, d], and the value of each group behind its gates.

        The last is a view [b, g, s, {gates, key, value} of d] of the product: positions turn the others,
        and `core` takes value and gates from it.
        """
        queries = self.queries_per_group
        sizes = (self.local_groups, 2 * queries + 2, self.spec.attention.head_dim)
        fused = self.query_key_value(x_sbh).unflatten(2, sizes)
        query, _, key, value = fused.split([queries, queries, 1, 1], dim=3)
        query, key, _ = self.in_heads(query, key, value)
        if tables:
            query, key = (self.kernels.rotary(x, *tables) for x in (query, key))
        return query, key, fused[..., queries:, :].flatten(3).permute(1, 2, 0, 3)

    def core(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, **biases: Any) -> Tensor:
        """Compute core attention, and multiply the mixed values [b, a, s, d] by their gates."""
        head_dim = self.spec.attention.head_dim
        gate, _, value = value.tensor_split([-2 * head_dim, -head_dim], -1)
        gate = gate.unflatten(-1, (-1, head_dim)).transpose(2, 3).flatten(1, 2)
        return super().core(query, key, value, mask, **biases) * gate.sigmoid()
