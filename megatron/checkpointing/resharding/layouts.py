"""Resharding: read weights and optimizer states from DeepSpeed's files of any layout (TP, PP, ZeRO)."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing.manifest import Manifest, damage
from megatron.checkpointing.parameter_names import ParameterNames
from megatron.checkpointing.resharding.sharded_tensor import (
    OPTIMIZER_NAMES,
    FlatShard,
    FullCheckpoint,
    ParameterState,
    ShardedTensor,
)
from megatron.checkpointing.resharding.unpickle import read_tensors
from megatron.common.errors import CheckpointError

_LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def read_sharded(
    folder: Path, manifest: Manifest, *, optimizer: bool = True, verify: bool = True
) -> FullCheckpoint:
    """Read the checkpoint in `folder` and join the shards of all ranks that saved it.

    Tensors are memory-mapped and joined when read.

    Args:
        optimizer: whether to read the optimizer states and its fp32 weights. Otherwise weights have
            the dtype of the network, except at ZeRO stage 3.
        verify: whether to compare each file with the manifest before it is read.

    Raises:
        CheckpointError: files are missing, damaged, or not as DeepSpeed lays them out.
    """
    files = _Files(folder, manifest, verify=verify)
    parallel = manifest.plan["parallel"]
    try:
        names = ParameterNames.of(manifest.plan["model"])
        ranks = [
            _tensor_rank(files, rank, parallel, names, optimizer=optimizer)
            for rank in range(parallel["tensor"])
        ]
        parameters = {
            name: _join_shards(
                [shards[name] for shards in ranks], manifest.partition_dims.get(name)
            )
            for name in ranks[0]
        }
        counters, scaler = _counters_and_scaler(files, parallel)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: the files are not as DeepSpeed lays them out: {error!r}"
        ) from error
    return FullCheckpoint(parameters=parameters, counters=counters, loss_scaler=scaler)


class _Files:
    """The files of a checkpoint, each read once."""

    def __init__(self, folder: Path, manifest: Manifest, *, verify: bool):
        self.folder = folder
        self.records = {record.name: record for record in manifest.files}
        self._verify = verify
        self._read: dict[str, Any] = {}

    def read(self, name: str) -> Any:
        """Load the file `name`."""
        if name not in self.records:
            raise CheckpointError(f"{self.folder} has no file {name}")
        if name not in self._read:
            if self._verify and (problems := damage(self.folder, [self.records[name]])):
                raise CheckpointError("; ".join(problems))
            self._read[name] = read_tensors(self.folder / name)
        return self._read[name]

    def optimizer_files(self, rank: int) -> list[str]:
        """List the optimizer files of all replicas for one rank of the model, in the order of replicas."""
        found = [match for name in self.records if (match := _OPTIMIZER_FILE.fullmatch(name))]
        own = [match for match in found if int(match[2]) == rank]
        return [match.group() for match in sorted(own, key=lambda match: int(match[1]))]


class _Shard:
    """A tensor-parallel shard of a parameter, partitioned by ZeRO over the replicas."""

    def __init__(self, shape: Sequence[int]):
        self.shape = tuple(shape)
        self.weight: list[Tensor] = []
        self.states: dict[str, list[Tensor]] = {}
        self.steps: float | None = None

    def add(self, weight: Tensor, state: Mapping[str, Any], span: slice = slice(None)) -> None:
        """Add the next replica's partition: flat weights, and the slice `span` of flat states.

        Raises:
            ValueError: a state does not have one element per weight.
        """
        self.weight.append(weight)
        for name, value in state.items():
            if name == "step":
                self.steps = float(value)
            elif value is not None:
                part = value.reshape(-1)[span] if torch.is_tensor(value) else None
                if part is None or part.numel() != weight.numel():
                    raise ValueError(
                        f"the optimizer's state {name} does not have one element per weight"
                    )
                self.states.setdefault(name, []).append(part)


Shards = dict[str, _Shard]


def _tensor_rank(
    files: _Files,
    tensor_rank: int,
    parallel: Mapping[str, Any],
    names: ParameterNames,
    *,
    optimizer: bool,
) -> Shards:
    """Return a tensor-parallel rank's shards of all stages; of tied weights, the first stage's."""
    shards: Shards = {}
    if parallel["pipeline"] > 1:
        shards = _model_weights(dict(_layers(files, tensor_rank, names)))
    trained: Shards = {}
    for stage in range(parallel["pipeline"]):
        rank = stage * parallel["tensor"] + tensor_rank
        if parallel["zero_stage"] == 3:
            return _zero_3(files, rank, optimizer=optimizer)
        main = files.read(f"mp_rank_{rank:02d}_model_states.pt")
        if main["module"] is not None:
            shards = _model_weights(main["module"])
        if optimizer:
            found = (
                _unpartitioned(main, shards)
                if main["optimizer"]
                else _zero_1_or_2(files, rank, main)
            )
            trained = found | trained
    return shards | trained


def _model_weights(weights: Mapping[str, Tensor]) -> Shards:
    """Wrap the weights of the network, in its dtype."""
    shards = {name: _Shard(weight.shape) for name, weight in weights.items()}
    for name, weight in weights.items():
        shards[name].add(weight.reshape(-1), {})
    return shards


def _layers(files: _Files, tensor_rank: int, names: ParameterNames) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights in a pipeline's layer files."""
    for match in filter(None, map(_LAYER_FILE.fullmatch, sorted(files.records))):
        if int(match[2]) == tensor_rank:
            for name, weight in files.read(match.group()).items():
                # The file of a tied layer has the layer's number; its parameters have the tied name.
                yield names.of_layer(int(match[1]), name), weight


def _unpartitioned(main: Mapping[str, Any], network: Shards) -> Shards:
    """Read trained weights and states of an optimizer that ZeRO does not partition (stage 0)."""
    saved, names = main["optimizer"], main[OPTIMIZER_NAMES]
    shards = {}
    for group, own in zip(saved["param_groups"], names, strict=True):
        for number, name in zip(group["params"], own, strict=True):
            shards[name] = _Shard(network[name].shape)
            shards[name].add(network[name].weight[0], saved["state"].get(number, {}))
            _count_steps(shards[name], group)
    return shards


def _zero_1_or_2(files: _Files, rank: int, main: Mapping[str, Any]) -> Shards:
    """Read fp32 weights and optimizer states partitioned by ZeRO stage 1 or 2."""
    shapes = {name: shape for group in main["param_shapes"] for name, shape in group.items()}
    shards = {name: _Shard(shape) for name, shape in shapes.items()}
    for file in files.optimizer_files(rank):
        saved = files.read(file)["optimizer_state_dict"]
        base = saved["base_optimizer_state"]
        for number, (weights, spans) in enumerate(
            zip(
                saved["single_partition_of_fp32_groups"], saved["param_slice_mappings"], strict=True
            )
        ):
            for name, address in spans.items():
                span = slice(address.start, address.start + address.numel)
                shards[name].add(weights[span], base["state"].get(number, {}), span)
                _count_steps(shards[name], base["param_groups"][number])
    return shards


def _zero_3(files: _Files, rank: int, *, optimizer: bool) -> Shards:
    """Read weights and optimizer states partitioned by ZeRO stage 3; trained weights are fp32.

    Each replica has ceil(numel / replicas) elements of a parameter, padded at the end; partitions
    follow each other in the order of `param_shapes`.
    """
    names = files.optimizer_files(rank)
    numbers = [match[1] for name in names if (match := _OPTIMIZER_FILE.fullmatch(name))]
    mains = [files.read(f"zero_pp_rank_{n}_mp_rank_{rank:02d}_model_states.pt") for n in numbers]
    frozen, shapes = mains[0]["frozen_param_shapes"] or {}, mains[0]["param_shapes"]
    trained = {name: shape for group in shapes for name, shape in group.items()}
    shards = {name: _Shard(shape) for name, shape in {**frozen, **trained}.items()}
    for main, file in zip(mains, names, strict=True):
        for name in frozen:
            shards[name].add(main["frozen_param_fragments"][name].reshape(-1), {})
        saved = files.read(file)["optimizer_state_dict"]
        base = saved["optimizer_state_dict"]
        order, constants = iter(trained.items()), _groups_by_index(base["param_groups"])
        for number, weights in enumerate(saved["fp32_flat_groups"]):
            start, state = 0, base["state"].get(number, {}) if optimizer else {}
            while start < weights.numel():
                name, shape = next(order)
                stop = start + -(-math.prod(shape) // len(names))
                shards[name].add(weights.view(-1)[start:stop], state, slice(start, stop))
                if optimizer:
                    _count_steps(shards[name], constants[number])
                start = stop
        if left := [name for name, _ in order]:
            raise ValueError(f"{file} holds no {left[0]}")
    return shards


def _groups_by_index(groups: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    return {number: group for group in groups for number in group["params"]}


def _count_steps(shard: _Shard, group: Mapping[str, Any]) -> None:
    """Copy the step count of an optimizer that keeps one per parameter group."""
    if "step" in group:
        shard.steps = float(group["step"])


def _join_shards(shards: Sequence[_Shard], dim: int | None) -> ParameterState:
    shape = list(shards[0].shape)
    if dim is not None:
        shape[dim] *= len(shards)

    def joined(parts: Sequence[Sequence[Tensor]]) -> ShardedTensor:
        pieces = [FlatShard(part) for part in parts]
        return ShardedTensor(shape=tuple(shape), dim=dim, shards=pieces, stored=shape[0])

    return ParameterState(
        weight=joined([shard.weight for shard in shards]),
        states={
            name: joined([shard.states[name] for shard in shards]) for name in shards[0].states
        },
        steps=shards[0].steps,
    )


def _counters_and_scaler(
    files: _Files, parallel: Mapping[str, Any]
) -> tuple[dict[str, int], Mapping[str, Any]]:
    """Read DeepSpeed's counters and the attributes of its loss scaler; {} if there is none."""
    first = "zero_pp_rank_0_" if parallel["zero_stage"] == 3 else ""
    main = files.read(f"{first}mp_rank_00_model_states.pt")
    counters = {name: int(main[name]) for name in _COUNTERS}
    for file in files.optimizer_files(0)[:1]:
        scaler = files.read(file)["optimizer_state_dict"].get("loss_scaler")
        return counters, vars(scaler) if scaler else {}
    return counters, {}
