"""Files of a ZeRO-1 checkpoint of any number of ranks, made when they are opened."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.manifest import FileRecord, Manifest
from megatron.checkpointing.resharding.sharded_tensor import ParameterState, fill_from
from megatron.checkpointing.resharding.unpickle import FragmentAddress
from megatron.checkpointing.train_state import TrainState
from megatron.config.plan.plan import Plan
from megatron.tensor_parallel.sharding import Shard


class ZeroFiles:
    """The files of a network of square matrices, two a layer: sharded by rows, and by columns.

    Args:
        plan: of the run that saved them.
        on_read: called for each file that is read.
    """

    def __init__(self, plan: Plan, on_read: Callable[[], None]):
        self._plan, self._on_read = plan, on_read
        self._parallel, self._width = plan.parallel, plan.model.hidden_size
        stages = range(plan.parallel.pipeline)
        self._dims = {name: _dim(name) for stage in stages for name in self._names(stage)}

    def manifest(self) -> Manifest:
        """Return the manifest with the files of all ranks."""
        tensor, layers = self._parallel.tensor, self._plan.model.num_layers
        ranks = range(tensor * self._parallel.pipeline)
        names = [f"mp_rank_{rank:02d}_model_states.pt" for rank in ranks]
        names += [
            f"bf16_zero_pp_rank_{replica}_mp_rank_{rank:02d}_optim_states.pt"
            for rank in ranks
            for replica in range(self._parallel.data)
        ]
        names += [
            f"layer_{number:02d}-model_{rank:02d}-model_states.pt"
            for number in range(layers)
            for rank in range(tensor)
        ]
        return Manifest(
            state=TrainState(iteration=1),
            plan=self._plan.to_dict(),
            config={},
            versions={},
            partition_dims=self._dims,
            files=tuple(FileRecord(name, 1, "xxh3_128:0") for name in names),
        )

    def read(self, file: Path) -> Any:
        """Return the content of a file."""
        self._on_read()
        name, width, tensor = file.name, self._width, self._parallel.tensor
        shapes = (width // tensor, width), (width, width // tensor)
        if name.startswith("layer"):
            return {kind: torch.zeros(shapes[_dim(kind)]) for kind in "rc"}
        names = self._names(int(name.partition("mp_rank_")[2][:2]) // tensor)
        if name.startswith("mp"):
            counters = dict.fromkeys(("global_steps", "global_samples", "skipped_steps"), 1)
            of_stage = {name: shapes[_dim(name)] for name in names}
            return {"module": None, "optimizer": None, "param_shapes": [of_stage], **counters}
        spans = {}
        low, high = _partition(len(names) * width**2 // tensor, self._parallel.data, name)
        for parameter, first, last in _overlaps(names, width**2 // tensor, low, high):
            spans[parameter] = address = FragmentAddress()
            address.start, address.numel = first - low, last - first
        flat = torch.zeros(high - low)
        return {
            "optimizer_state_dict": {
                "base_optimizer_state": {
                    "state": {0: {"exp_avg": flat, "exp_avg_sq": flat, "step": 1}},
                    "param_groups": [{}],
                },
                "single_partition_of_fp32_groups": [flat],
                "param_slice_mappings": [spans],
            }
        }

    def fill_reshaped(self, parameters: Mapping[str, ParameterState], rank: int) -> None:
        """Fill a rank's partition in half as many tensor-parallel ranks and twice the replicas."""
        tensor, replicas = self._parallel.tensor // 2, 2 * self._parallel.data
        replica = rank // tensor % replicas
        names = self._names(rank // tensor // replicas)
        numel = self._width**2 // tensor
        size = len(names) * numel // replicas
        spans = _overlaps(names, numel, replica * size, (replica + 1) * size)
        for name, low, high in spans:
            shape = [self._width, self._width]
            shape[_dim(name)] //= tensor
            shard, start = Shard(_dim(name), rank % tensor, tensor), low - names.index(name) * numel
            for full in parameters[name].tensors.values():
                fill_from(torch.empty(high - low), full, shard, shape, start)

    def _names(self, stage: int) -> list[str]:
        each = self._plan.model.num_layers // self._parallel.pipeline
        return [f"{n}.{kind}" for n in range(stage * each, (stage + 1) * each) for kind in "rc"]


def _dim(name: str) -> int:
    return 0 if name.endswith("r") else 1


def _partition(numel: int, replicas: int, file: str) -> tuple[int, int]:
    """Return the first and last element of a replica's partition, whose file this is."""
    size, replica = numel // replicas, int(file.split("_")[4])
    return replica * size, (replica + 1) * size


def _overlaps(names: list[str], numel: int, low: int, high: int) -> list[tuple[str, int, int]]:
    """Return which elements of a row of parameters lie in a partition."""
    found = ((name, i * numel, (i + 1) * numel) for i, name in enumerate(names))
    spans = ((name, max(first, low), min(last, high)) for name, first, last in found)
    return [(name, first, last) for name, first, last in spans if first < last]
