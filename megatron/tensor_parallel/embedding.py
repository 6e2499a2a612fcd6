"""A token table whose rows are divided over the tensor-parallel ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.tensor_parallel.collectives import reduce_from_tensor_parallel, scatter_sequence
from megatron.tensor_parallel.sharding import exact_quotient, layout_of, mark_initial, mark_sharded


class VocabParallelEmbedding(nn.Module):
    """Look tokens up in a table of which every rank holds a contiguous range of rows.

    Args:
        num_embeddings: rows over all ranks; a multiple of the group's size.
        embedding_dim: features per row.
        group: the tensor-parallel ranks.
        sequence_parallel: whether they divide the sequence of the result.

    Shapes: ids_bs [b, s] int64 -> [b, s, embedding_dim]; [b, s/t, embedding_dim] when the ranks
        divide the sequence.
    Communication: one all-reduce of the result forward; none backward. When the ranks divide the
        sequence: a reduce-scatter forward, an all-gather backward.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: dist.ProcessGroup,
        sequence_parallel: bool = False,
    ):
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.local_rows = exact_quotient(num_embeddings, group.size(), "num_embeddings")
        weight = nn.Parameter(torch.empty(self.local_rows, embedding_dim))
        self.weight = mark_initial(mark_sharded(weight, 0, group), "vocabulary")

    def forward(self, ids_bs: Tensor) -> Tensor:
        if self.group.size() == 1:
            return F.embedding(ids_bs, self.weight)
        local_bs = ids_bs - self.group.rank() * self.local_rows
        foreign_bs = (local_bs < 0) | (local_bs >= self.local_rows)
        # Every rank must look something up, so a foreign token reads row 0 and is zeroed.
        found = F.embedding(local_bs.masked_fill(foreign_bs, 0), self.weight)
        found = found.masked_fill(foreign_bs[..., None], 0.0)
        if self.sequence_parallel:
            return scatter_sequence(found, 1, self.group)
        return reduce_from_tensor_parallel(found, self.group)

    def extra_repr(self) -> str:
        """Return the sizes over all ranks, and the parallel layout."""
        sizes = f"num_embeddings={self.num_embeddings}, embedding_dim={self.embedding_dim}"
        return f"{sizes}, {layout_of(self)}"

    def own_tokens(self, tokens_bs: Tensor) -> Tensor:
        """Return this rank's slice of a per-token tensor."""
        if not self.sequence_parallel:
            return tokens_bs
        return tokens_bs.chunk(self.group.size(), 1)[self.group.rank()]
