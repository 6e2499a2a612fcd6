"""Resharding: read weights and optimizer states from DeepSpeed's files of any layout (TP, PP, ZeRO).

An index has the location of each parameter. It is made from the files of the first tensor-parallel
rank and the first replica, is no larger than the list of parameters, and can be sent to other
processes. Other files are opened when elements in them are needed.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing.manifest import Manifest, damage
from megatron.checkpointing.parameter_names import (
    ParameterNames,
    is_buffer,
)
from megatron.checkpointing.resharding.sharded_index import (
    OPTIMIZER_FILE,
    Key,
    ParameterLocation,
    ShardedIndex,
    ShardFiles,
    ShardLocation,
)
from megatron.checkpointing.resharding.sharded_tensor import (
    OPTIMIZER_NAMES,
    FullCheckpoint,
)
from megatron.common.errors import CheckpointError

_LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_MAIN = "mp_rank_{rank:02d}_model_states.pt"
_MAIN_OF_STAGE_3 = "zero_pp_rank_{replica}_mp_rank_{rank:02d}_model_states.pt"
_STATE = "optimizer_state_dict"
_SPANS = "param_slice_mappings"
_OLD_EXPERTS = re.compile(r"layer_\d+_expert_\d+_")
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def read_sharded(
    folder: Path, manifest: Manifest, *, optimizer: bool = True, verify: bool = True
) -> FullCheckpoint:
    """Read the checkpoint in `folder` and join the shards of all ranks that saved it.

    Tensors are memory-mapped and joined when read.

    Args:
        optimizer: whether to read the optimizer states and its fp32 weights. Otherwise weights have
            the dtype of the network, except at ZeRO stage 3.
        verify: whether to compare the files with the manifest first.

    Raises:
        CheckpointError: files are missing, damaged, or not as DeepSpeed lays them out; also later,
            when a tensor of another file is read.
    """
    if verify:
        needed = [
            record
            for record in manifest.files
            if optimizer or _has_weights(record.name, manifest.parallel.zero_stage)
        ]
        if problems := damage(folder, needed):
            raise CheckpointError("; ".join(problems))
    return sharded_index(folder, manifest, optimizer=optimizer).checkpoint(folder)


def _has_weights(name: str, zero_stage: int) -> bool:
    return zero_stage == 3 or not OPTIMIZER_FILE.fullmatch(name)


def sharded_index(folder: Path, manifest: Manifest, *, optimizer: bool = True) -> ShardedIndex:
    """Return the location of each parameter of the checkpoint in `folder`.

    Args:
        manifest: with its list of files.
        optimizer: as in `read_sharded`.

    Raises:
        CheckpointError: files are missing, damaged, or not as DeepSpeed lays them out.
    """
    if any(_OLD_EXPERTS.match(record.name) for record in manifest.files):
        raise CheckpointError(
            f"{folder} has a file for each expert, as versions with DeepSpeed's layers of experts "
            f"saved them; go on with the version that saved it: {manifest.versions.get('megatron')}"
        )
    files = ShardFiles(folder, {record.name for record in manifest.files})
    parallel = manifest.parallel
    return ShardedIndex(
        tensor=parallel.tensor,
        expert=parallel.expert,
        ranks_per_expert=parallel.ranks_per_expert,
        parameters={
            name: replace(entry, dim=manifest.partition_dims.get(name))
            for name, entry in files.in_layout(
                lambda: _parameters(files, manifest, optimizer=optimizer)
            ).items()
        },
        progress=files.in_layout(lambda: _counters_and_scaler(files, parallel.zero_stage)),
    )


def _parameters(
    files: ShardFiles, manifest: Manifest, *, optimizer: bool
) -> dict[str, ParameterLocation]:
    """Return where all parameters lie; of tied weights, the first stage's."""
    parallel = manifest.parallel
    if parallel.zero_stage == 3:
        return _zero_3(files, optimizer=optimizer)
    found: dict[str, ParameterLocation] = {}
    if parallel.pipeline > 1:
        found = dict(_layers(files, ParameterNames.of(manifest.spec)))
    trained: dict[str, ParameterLocation] = {}
    for stage in range(parallel.pipeline):
        rank = stage * parallel.tensor
        main = files.read(_MAIN.format(rank=rank))
        if main["module"] is not None:
            found = {
                name: _network_parameter(stage, _MAIN, ("module", name), weight)
                for name, weight in main["module"].items()
            }
        if optimizer:
            make = _find_unpartitioned if main["optimizer"] else _zero_1_or_2
            trained = make(files, stage, rank, main, found) | trained
    return found | trained


def _network_parameter(
    stage: int, file: str, keys: tuple[Key, ...], weight: Tensor
) -> ParameterLocation:
    """Return where a weight of the network lies, in its dtype."""
    return ParameterLocation(
        stage, tuple(weight.shape), ShardLocation(file, keys, weight.element_size())
    )


def _layers(files: ShardFiles, names: ParameterNames) -> Iterator[tuple[str, ParameterLocation]]:
    """Yield the weights in a pipeline's layer files."""
    for match in filter(None, map(_LAYER_FILE.fullmatch, sorted(files.names))):
        if int(match[2]) == 0:
            file = f"layer_{match[1]}-model_{{tensor:02d}}-model_states.pt"
            for name, weight in files.read(match.group()).items():
                # The file of a tied layer has the layer's number; its parameters have the tied name.
                yield (
                    names.of_layer(int(match[1]), name),
                    _network_parameter(0, file, (name,), weight),
                )


def _find_unpartitioned(
    files: ShardFiles,
    stage: int,
    rank: int,
    main: Mapping[str, Any],
    network: Mapping[str, ParameterLocation],
) -> dict[str, ParameterLocation]:
    """Return where trained weights and states lie that ZeRO does not partition (stage 0)."""
    saved, names = main["optimizer"], main[OPTIMIZER_NAMES]
    found = {}
    for group, own in zip(saved["param_groups"], names, strict=True):
        for number, name in zip(group["params"], own, strict=True):
            weight = network[name]
            state, numel = saved["state"].get(number, {}), math.prod(weight.shape)
            place = partial(ShardLocation, _MAIN)
            found[name] = replace(
                weight,
                stage=stage,
                states=_states(state, {numel}, place, ("optimizer", "state", number)),
                steps=_steps(state, group),
            )
    return found


def _zero_1_or_2(
    files: ShardFiles,
    stage: int,
    rank: int,
    main: Mapping[str, Any],
    network: Mapping[str, ParameterLocation],
) -> dict[str, ParameterLocation]:
    """Return where fp32 weights and optimizer states lie that ZeRO stage 1 or 2 partitions."""
    file = files.optimizer_file(rank)
    saved = files.read(file.format(replica=0, rank=rank))[_STATE]
    base, found = saved["base_optimizer_state"], {}
    # Padding after each parameter; versions of DeepSpeed without this key have none.
    paddings = saved.get("param_alignment_paddings")
    at_end = saved.get("group_paddings") or [0] * len(main["param_shapes"])
    groups = zip(main["param_shapes"], saved["single_partition_of_fp32_groups"], strict=True)
    for number, (shapes, weights) in enumerate(groups):
        state, start = base["state"].get(number, {}), 0
        behind = paddings[number] if paddings else [0] * len(shapes)
        for (name, shape), padding in zip(shapes.items(), behind, strict=True):
            place = partial(
                ShardLocation,
                file,
                # A group that ends in the first partition is saved without its padding.
                partition=weights.numel(),
                start=start,
                spans=(_STATE, _SPANS, number),
            )
            keys = (_STATE, "base_optimizer_state", "state", number)
            # Where weights are saved without the padding at their end, states are saved with it.
            sizes = {weights.numel(), weights.numel() + at_end[number]}
            found[name] = ParameterLocation(
                stage,
                tuple(shape),
                place(
                    keys=(_STATE, "single_partition_of_fp32_groups", number),
                    element_size=weights.element_size(),
                ),
                _states(state, sizes, place, keys),
                _steps(state, base["param_groups"][number]),
            )
            start += math.prod(shape) + padding
    return found


def _zero_3(files: ShardFiles, *, optimizer: bool) -> dict[str, ParameterLocation]:
    """Return where weights and states lie that ZeRO stage 3 partitions; trained weights are fp32.

    Each replica has ceil(numel / replicas) elements of a parameter, padded at the end; partitions
    follow each other in the order of `param_shapes`.
    """
    file, count = files.optimizer_file(0), files.num_replicas()
    main = files.read(_MAIN_OF_STAGE_3.format(replica=0, rank=0))
    found = {
        name: _network_parameter(
            0, _MAIN_OF_STAGE_3.replace("{replica}", "0"), ("module", name), buffer
        )
        for name, buffer in main["module"].items()
        if is_buffer(name)
    }
    for name, shape in (main["frozen_param_shapes"] or {}).items():
        fragment = main["frozen_param_fragments"][name]
        weight = ShardLocation(
            _MAIN_OF_STAGE_3,
            ("frozen_param_fragments", name),
            fragment.element_size(),
            partition=-(-math.prod(shape) // count),
        )
        found[name] = ParameterLocation(0, tuple(shape), weight)
    saved = files.read(file.format(replica=0, rank=0))[_STATE]
    base = saved[_STATE]
    constants = _groups_by_index(base["param_groups"])
    order = iter([item for group in main["param_shapes"] for item in group.items()])
    for number, weights in enumerate(saved["fp32_flat_groups"]):
        start, state = 0, base["state"].get(number, {}) if optimizer else {}
        while start < weights.numel():
            name, shape = next(order)
            size = -(-math.prod(shape) // count)
            place = partial(ShardLocation, file, partition=size, start=start)
            found[name] = ParameterLocation(
                0,
                tuple(shape),
                place(
                    keys=(_STATE, "fp32_flat_groups", number), element_size=weights.element_size()
                ),
                _states(state, {weights.numel()}, place, (_STATE, _STATE, "state", number)),
                _steps(state, constants[number]) if optimizer else None,
            )
            start += size
    if left := [name for name, _ in order]:
        raise ValueError(f"{file} holds no {left[0]}")
    return found


def _groups_by_index(groups: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    return {number: group for group in groups for number in group["params"]}


def _states(
    state: Mapping[str, Any], sizes: set[int], place: Any, keys: tuple[Key, ...]
) -> dict[str, ShardLocation]:
    """Return where an optimizer's states lie.

    Raises:
        ValueError: a state does not have one element per weight.
    """
    found = {}
    for name, value in state.items():
        if name == "step" or value is None:
            continue
        if not torch.is_tensor(value) or value.numel() not in sizes:
            raise ValueError(f"the optimizer's state {name} does not have one element per weight")
        found[name] = place(keys=(*keys, name), element_size=value.element_size())
    return found


def _steps(state: Mapping[str, Any], group: Mapping[str, Any]) -> float | None:
    """Return the steps taken, which an optimizer counts in each state or in each parameter group."""
    taken = group["step"] if "step" in group else state.get("step")
    return None if taken is None else float(taken)


def _counters_and_scaler(
    files: ShardFiles, zero_stage: int
) -> tuple[dict[str, int], Mapping[str, Any]]:
    """Read DeepSpeed's counters and the attributes of its loss scaler; {} if there is none."""
    template = _MAIN_OF_STAGE_3 if zero_stage == 3 else _MAIN
    main = files.read(template.format(replica=0, rank=0))
    counters = {name: int(main[name]) for name in _COUNTERS}
    if any(map(OPTIMIZER_FILE.fullmatch, files.names)):
        saved = files.read(files.optimizer_file(0).format(replica=0, rank=0))[_STATE]
        scaler = saved.get("loss_scaler")
        # Its numbers and switches alone, which ranks can send each other.
        attributes = vars(scaler) if scaler else {}
        plain = {n: value for n, value in attributes.items() if isinstance(value, int | float)}
        return counters, plain
    return counters, {}
