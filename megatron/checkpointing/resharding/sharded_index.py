"""Index of a sharded checkpoint: where each parameter lies in DeepSpeed's files; reads slices of them."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpointing.parameter_names import expert_file, is_of_experts
from megatron.checkpointing.resharding.sharded_tensor import (
    FullCheckpoint,
    LazyParameters,
    ParameterState,
    ShardedTensor,
    StoredShard,
)
from megatron.checkpointing.resharding.unpickle import read_tensors
from megatron.common.errors import CheckpointError

OPTIMIZER_FILE = re.compile(r"((?:bf16_)?)zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")

Key = str | int


@dataclass(frozen=True)
class ShardLocation:
    """Location of each tensor-parallel rank's flattened shard.

    Args:
        file: its name, with `tensor`, the `rank` in a replica, and the `replica` left open.
        keys: of the tensor in the file.
        element_size: in bytes.
        partition: elements in a replica's partition; 0 for a tensor that is not partitioned.
        start: first element: in the joined partitions, or at ZeRO stage 3 in each of them.
        spans: keys of the spans that the partition has of each parameter; () if it names none.
    """

    file: str
    keys: tuple[Key, ...]
    element_size: int
    partition: int = 0
    start: int = 0
    spans: tuple[Key, ...] = ()

    @property
    def is_of_stage_3(self) -> bool:
        """Whether each replica has an equal part of each parameter."""
        return bool(self.partition) and not self.spans


@dataclass(frozen=True)
class ParameterLocation:
    """Where a parameter lies.

    Args:
        stage: of the pipeline.
        shape: of a shard.
        states: of the optimizer, by name.
        dim: along which shards are joined; None for a replicated parameter.
    """

    stage: int
    shape: tuple[int, ...]
    weight: ShardLocation
    states: Mapping[str, ShardLocation] = field(default_factory=dict)
    steps: float | None = None
    dim: int | None = None


@dataclass(frozen=True, kw_only=True)
class ShardedIndex:
    """Where each parameter of a checkpoint lies; holds no tensors.

    Args:
        tensor: tensor-parallel ranks of the run that saved it.
        expert: sets of neighbouring ranks of a stage that divided the experts of a layer.
        ranks_per_expert: neighbouring ranks that divided each expert.
        progress: counters, and the attributes of the loss scaler.
    """

    tensor: int
    ranks_per_expert: int
    parameters: Mapping[str, ParameterLocation]
    progress: tuple[Mapping[str, int], Mapping[str, Any]]
    expert: int = 1

    def checkpoint(self, folder: Path) -> FullCheckpoint:
        """Return the checkpoint in `folder`; a file is opened when elements in it are needed."""
        files = ShardFiles(folder)
        counters, scaler = self.progress
        return FullCheckpoint(
            parameters=LazyParameters(
                {
                    name: partial(self._parameter, files, name, entry)
                    for name, entry in self.parameters.items()
                }
            ),
            counters=counters,
            loss_scaler=scaler,
        )

    def _parameter(
        self, files: "ShardFiles", name: str, entry: ParameterLocation
    ) -> ParameterState:
        shape = list(entry.shape)
        shares, ranks = (
            (self.expert, self.ranks_per_expert) if is_of_experts(name) else (1, self.tensor)
        )
        numel, count = math.prod(shape), 1 if entry.dim is None else ranks
        shape[0] *= shares
        if entry.dim is not None:
            shape[entry.dim] *= count

        def joined(place: ShardLocation) -> ShardedTensor:
            shards = [
                StoredShard(
                    numel=numel,
                    element_size=place.element_size,
                    first=0 if place.is_of_stage_3 else place.start,
                    partition=place.partition or numel,
                    read=partial(
                        files.slice_of,
                        place,
                        name,
                        numel,
                        Holders(
                            first=share * ranks + index,
                            step=shares * ranks,
                            tensor=self.tensor,
                            stage=entry.stage,
                        ),
                    ),
                )
                for share in range(shares)
                for index in range(count)
            ]
            return ShardedTensor(
                shape=tuple(shape),
                dim=entry.dim,
                shards=shards,
                stored=shape[0],
                stacks=shares,
            )

        return ParameterState(
            weight=joined(entry.weight),
            states={state: joined(place) for state, place in entry.states.items()},
            steps=entry.steps,
        )


@dataclass(frozen=True, kw_only=True)
class Holders:
    """The ranks with the same shard of a parameter, each of which may have a partition of it.

    Args:
        first: the first of them, among the ranks of a stage.
        step: between them.
        tensor: tensor-parallel ranks.
        stage: of the pipeline.
    """

    first: int
    step: int
    tensor: int
    stage: int

    def ranks(self, partition: int) -> dict[str, int]:
        """Return the replica of the rank with a partition, and its number in that, and its tensor rank."""
        replica, tensor = divmod(self.first + partition * self.step, self.tensor)
        return {"replica": replica, "tensor": tensor, "rank": self.stage * self.tensor + tensor}


class ShardFiles:
    """The files of a checkpoint, each opened once.

    Args:
        names: of all files; None where they are not known.
    """

    def __init__(self, folder: Path, names: set[str] | None = None):
        self.folder, self.names = folder, names or set()
        self._read: dict[str, Any] = {}
        self._must_be_known = names is not None

    def read(self, name: str) -> Any:
        """Load the file `name`."""
        if self._must_be_known and name not in self.names:
            raise CheckpointError(f"{self.folder} has no file {name}")
        if name not in self._read:
            self._read[name] = read_tensors(self.folder / name)
        return self._read[name]

    def slice_of(
        self,
        place: ShardLocation,
        name: str,
        numel: int,
        holders: Holders,
        partition: int,
        low: int,
        high: int,
    ) -> Tensor:
        """Return elements `low` to `high` of a partition, or of an undivided tensor.

        Args:
            name: of the parameter.
            numel: of its shard.
            partition: its number; 0 of an undivided tensor.

        Raises:
            CheckpointError: the file does not hold them.
        """

        def cut() -> Tensor:
            ranks = holders.ranks(partition)
            own = _of_replica(place, name, ranks["replica"], ranks["rank"])
            content = self.read(own.file.format(**ranks))
            if own.spans:
                _require_span(_at(content, own.spans), own, name, numel, partition)
            flat: Tensor = _at(content, own.keys).reshape(-1)
            first = own.start if own.is_of_stage_3 else 0
            found = flat[first + low : first + high]
            if len(found) != high - low or not own.partition and flat.numel() != numel:
                raise ValueError(f"the tensor of {name} has {flat.numel()} elements")
            return found

        return self.in_layout(cut)

    def in_layout(self, make: Any) -> Any:
        """Call `make`, which reads files.

        Raises:
            CheckpointError: they are not as DeepSpeed lays them out.
        """
        try:
            return make()
        except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.folder}: the files are not as DeepSpeed lays them out: {error!r}"
            ) from error

    def optimizer_file(self, rank: int) -> str:
        """Return the name of the optimizer file of the first replica, with the replica left open."""
        for name in self.names:
            match = OPTIMIZER_FILE.fullmatch(name)
            if match and int(match[2]) == 0 and int(match[3]) == rank:
                return match[1] + "zero_pp_rank_{replica}_mp_rank_{rank:02d}_optim_states.pt"
        raise CheckpointError(f"{self.folder} has no optimizer states of rank {rank}")

    def num_replicas(self) -> int:
        """Return the number of replicas that have optimizer states."""
        found = [match for name in self.names if (match := OPTIMIZER_FILE.fullmatch(name))]
        return 1 + max(int(match[2]) for match in found)


def _of_replica(place: ShardLocation, name: str, replica: int, rank: int) -> ShardLocation:
    """Return where the experts of a further replica lie, of which DeepSpeed writes the partitions."""
    if not replica or place.partition:
        return place
    is_state = place.keys[0] == "optimizer"
    keys = ("optimizer", name, place.keys[-1]) if is_state else ("module", name)
    return replace(place, file=expert_file(replica, rank), keys=keys)


def _at(content: Any, keys: Sequence[Key]) -> Any:
    for key in keys:
        content = content[key]
    return content


def _require_span(
    spans: Mapping[str, Any], place: ShardLocation, name: str, numel: int, partition: int
) -> None:
    """Refuse a partition that has other elements of a parameter than follow from its length."""
    begins = partition * place.partition
    low = max(place.start, begins) - begins
    length = min(place.start + numel, begins + place.partition) - begins - low
    found = spans[name]
    if (found.start, found.numel) != (low, length):
        raise ValueError(
            f"elements {found.start} to {found.start + found.numel} of partition {partition} "
            f"belong to {name}, instead of {low} to {low + length}"
        )
