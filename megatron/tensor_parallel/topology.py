"""Rank grid of pipeline, data, sequence and tensor parallelism; arithmetic without torch."""

from dataclasses import dataclass
from itertools import product


def zigzag_chunks(rank: int, ranks: int) -> tuple[int, int]:
    """Return which two of 2 * `ranks` chunks of a sequence a rank has, so that causal work is even.

    >>> zigzag_chunks(0, ranks=3), zigzag_chunks(2, ranks=3)
    ((0, 5), (2, 3))
    """
    return rank, 2 * ranks - 1 - rank


@dataclass(frozen=True)
class Topology:
    """A grid of ranks, in the order of the axes pipeline, data, sequence, tensor; the last is fastest.

    rank = ((pipeline * data_size + data) * sequence_size + sequence) * tensor_size + tensor.
    Tensor-parallel neighbours are adjacent ranks, so they share a node and its fast links; those
    that divide a sample's sequence come next. Without the latter the order is that of DeepSpeed's
    PipeModelDataParallelTopology.

    Args:
        expert: sets of `ranks_per_expert` neighbours of a stage that divide the experts of a layer.
        expert_tensor: neighbours that divide each expert; 0 for the tensor-parallel ranks.
        zigzag: whether a sequence is divided into chunks of `zigzag_chunks`, for ring attention,
            rather than into one slice for each rank.
    """

    pipeline: int
    data: int
    tensor: int
    sequence: int = 1
    expert: int = 1
    expert_tensor: int = 0
    zigzag: bool = False

    @property
    def ranks_per_expert(self) -> int:
        """Neighbouring ranks that divide each expert."""
        return self.expert_tensor or self.tensor

    @property
    def divides_experts(self) -> bool:
        """Whether experts are divided in another way than other layers."""
        return self.expert > 1 or self.ranks_per_expert != self.tensor

    def rank(self, *, pipeline: int, data: int, tensor: int, sequence: int = 0) -> int:
        """Return the global rank at these coordinates."""
        return ((pipeline * self.data + data) * self.sequence + sequence) * self.tensor + tensor

    def stage_of(self, rank: int) -> int:
        """Return the pipeline stage of `rank`."""
        return rank // (self.data * self.sequence * self.tensor)

    def data_rank_of(self, rank: int) -> int:
        """Return the data-parallel rank of `rank`."""
        return rank // (self.sequence * self.tensor) % self.data

    def sequence_rank_of(self, rank: int) -> int:
        """Return the sequence-parallel rank of `rank`."""
        return rank // self.tensor % self.sequence

    def tensor_rank_of(self, rank: int) -> int:
        """Return the tensor-parallel rank of `rank`."""
        return rank % self.tensor

    def tensor_groups(self) -> list[list[int]]:
        """List the tensor-parallel groups."""
        return self._sets("tensor")

    def sequence_groups(self) -> list[list[int]]:
        """List the sequence-parallel groups."""
        return self._sets("sequence")

    def data_groups(self) -> list[list[int]]:
        """List the data-parallel groups."""
        return self._sets("data")

    def expert_tensor_groups(self) -> list[list[int]]:
        """List the sets of ranks that divide each of their experts."""
        size = self.ranks_per_expert
        return [
            part[i : i + size] for part in self._expert_parts() for i in range(0, len(part), size)
        ]

    def expert_groups(self) -> list[list[int]]:
        """List the sets of ranks that divide the experts of a layer."""
        size = self.ranks_per_expert
        return [part[i::size] for part in self._expert_parts() for i in range(size)]

    def expert_data_groups(self) -> list[list[int]]:
        """List the sets of ranks with the same shard of the same experts."""
        size = self.expert * self.ranks_per_expert
        stages = self._sets("data", "sequence", "tensor")
        return [ranks[i::size] for ranks in stages for i in range(size)]

    def data_and_sequence_groups(self) -> list[list[int]]:
        """List the sets of ranks with the same shard of the model."""
        return self._sets("data", "sequence")

    def model_groups(self) -> list[list[int]]:
        """List the sets of ranks that make up one replica of the model."""
        return self._sets("pipeline", "tensor")

    def _expert_parts(self) -> list[list[int]]:
        """List the sets of neighbours of a stage that hold all experts of a layer once."""
        size = self.expert * self.ranks_per_expert
        stages = self._sets("data", "sequence", "tensor")
        return [ranks[i : i + size] for ranks in stages for i in range(0, len(ranks), size)]

    def _sets(self, *along: str) -> list[list[int]]:
        """List the sets of ranks that differ only in their coordinates on the axes `along`."""
        sizes = {
            "pipeline": self.pipeline,
            "data": self.data,
            "sequence": self.sequence,
            "tensor": self.tensor,
        }

        def points(axes: list[str]) -> list[dict[str, int]]:
            places = product(*(range(sizes[axis]) for axis in axes))
            return [dict(zip(axes, place, strict=True)) for place in places]

        inner = points([axis for axis in sizes if axis in along])
        outer = points([axis for axis in sizes if axis not in along])
        return [[self.rank(**fixed, **moving) for moving in inner] for fixed in outer]
