"""Which rank stands where on the three axes. Pure arithmetic: no torch, no processes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """A 3D grid of ranks: rank = (pipeline * data_size + data) * tensor_size + tensor.

    Tensor-parallel neighbours are adjacent ranks, so they share a node and its fast links.
    The order is that of DeepSpeed's PipeModelDataParallelTopology.
    """

    pipeline: int
    data: int
    tensor: int

    def rank(self, *, pipeline: int, data: int, tensor: int) -> int:
        """Return the global rank at these coordinates."""
        return (pipeline * self.data + data) * self.tensor + tensor

    def stage_of(self, rank: int) -> int:
        """Return the pipeline stage of `rank`."""
        return rank // (self.data * self.tensor)

    def data_rank_of(self, rank: int) -> int:
        """Return the place of `rank` among the replicas."""
        return rank // self.tensor % self.data

    def tensor_rank_of(self, rank: int) -> int:
        """Return the place of `rank` among those that share its layers."""
        return rank % self.tensor

    def tensor_groups(self) -> list[list[int]]:
        """Return every set of ranks that shares one copy of a layer."""
        return [
            [self.rank(pipeline=p, data=d, tensor=t) for t in range(self.tensor)]
            for p in range(self.pipeline)
            for d in range(self.data)
        ]

    def data_groups(self) -> list[list[int]]:
        """Return every set of ranks that holds the same shard of the model."""
        return [
            [self.rank(pipeline=p, data=d, tensor=t) for d in range(self.data)]
            for p in range(self.pipeline)
            for t in range(self.tensor)
        ]

    def model_groups(self) -> list[list[int]]:
        """Return every set of ranks that makes up one whole replica."""
        return [
            sorted(
                self.rank(pipeline=p, data=d, tensor=t)
                for p in range(self.pipeline)
                for t in range(self.tensor)
            )
            for d in range(self.data)
        ]
