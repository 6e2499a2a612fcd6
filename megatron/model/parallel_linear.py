"""Tensor-parallel linear layers and embedding under the name that tutorials import.

The layers themselves are those of `megatron.parallel.linear` and `megatron.parallel.embedding`.
"""

from megatron.parallel.embedding import VocabParallelEmbedding
from megatron.parallel.linear import ColumnParallelLinear, RowParallelLinear

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"]
