"""Layers of each pipeline stage: DeepSpeed's partition, without DeepSpeed."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from megatron.config.architecture.architecture import Entry, Kind, network_of
from megatron.config.architecture.counts import Weights
from megatron.config.architecture.partition import bounds_of, entries_of_rank
from megatron.config.network.model_spec import ModelSpec
from megatron.config.parallelism.layout import ParallelPlan


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Entries of one pipeline stage, or of a chunk of it."""

    index: int
    entries: tuple[Entry, ...]
    chunks: tuple["Stage", ...] = ()  # its virtual stages; empty with the schedule 1F1B

    @property
    def parts(self) -> tuple["Stage", ...]:
        """Its chunks, or itself if it is one."""
        return self.chunks or (self,)

    @property
    def blocks(self) -> list[Entry]:
        """Its layers; those of a decoder follow the encoder's."""
        return [entry for entry in self.entries if entry.kind == "block"]

    @property
    def layers(self) -> tuple[int, ...]:
        """Their numbers, from 1 on."""
        return tuple(entry.number for entry in self.blocks)

    def has(self, *kinds: Kind) -> bool:
        """Whether there is an entry of one of these kinds."""
        return any(entry.kind in kinds for entry in self.entries)

    @property
    def has_embedding(self) -> bool:
        """Whether tokens come in here."""
        return self.has("embedding")

    @property
    def has_final_norm(self) -> bool:
        """Whether the norm after the layers is on this stage."""
        return self.has("norm")

    @property
    def has_head(self) -> bool:
        """Whether logits are made here."""
        return self.has("logits", "task")

    @property
    def depths(self) -> int:
        """Depths of multi-token prediction."""
        return sum(entry.depths for entry in self.entries)

    @property
    def weights(self) -> Weights:
        """What one rank holds; what is tied inside a stage once."""
        return sum((entry.weights for entry in self._held), Weights())

    @property
    def trained(self) -> Weights:
        """Those of the weights that are not frozen."""
        return sum((entry.weights - entry.frozen for entry in self._held), Weights())

    @property
    def _held(self) -> list[Entry]:
        held = {entry.tie or index: entry for index, entry in reversed([*enumerate(self.entries)])}
        return [*held.values()]


def stages_of_network(
    spec: ModelSpec,
    parallel: ParallelPlan,
    *,
    mixed: bool,
    mark: Callable[[list[Entry]], list[Entry]] = list,
) -> list[Stage]:
    """Return the stages of a network, in order; one without a pipeline.

    Args:
        mixed: whether logits are cast to 32 bits at the end.
        mark: returns the entries of the network with what is frozen of them.
    """
    entries = mark(entries_of_rank(network_of(spec), spec, parallel, mixed=mixed))
    parts, ranks = _virtual_stages(entries, parallel), parallel.pipeline
    if parallel.chunks == 1:
        return parts
    return [_join(rank, tuple(parts[rank::ranks])) for rank in range(ranks)]


def _join(index: int, chunks: tuple[Stage, ...]) -> Stage:
    entries = tuple(entry for chunk in chunks for entry in chunk.entries)
    return Stage(index=index, entries=entries, chunks=chunks)


def _virtual_stages(entries: list[Entry], parallel: ParallelPlan) -> list[Stage]:
    """Return the parts that the partition cuts: stages, or chunks of stages."""
    return [
        Stage(index=index, entries=tuple(entries[start:stop]))
        for index, (start, stop) in enumerate(pairwise(bounds_of(entries, parallel)))
    ]


def entry_names(spec: ModelSpec, *, mixed: bool) -> list[str]:
    """Return the names of the entries of the list of layers, as the partition matches them.

    Args:
        mixed: whether logits are cast to 32 bits at the end.
    """
    names = [entry.name for entry in network_of(spec).entries(spec)]
    return [*names, *["to_float32"] * mixed]
