"""Tensor-parallel linear layers and embedding under the name that tutorials import.

Re-exports from `megatron.tensor_parallel.linear` and `megatron.tensor_parallel.embedding`.
"""

from megatron.tensor_parallel.embedding import VocabParallelEmbedding
from megatron.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"]
