"""Whole tensors into a running engine, whatever its layout: each rank takes its own elements."""

from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.checkpointing.parameter_names import is_buffer, is_of_vocabulary
from megatron.checkpointing.resharding.sharded_tensor import (
    FullCheckpoint,
    ParameterState,
    ShardedTensor,
    fill_from,
    full_shape,
)
from megatron.common.errors import CheckpointError
from megatron.engine.deepspeed.patches.master_weights import copy_to_weights, master_weight
from megatron.tensor_parallel.linear import is_adapter
from megatron.tensor_parallel.object_collectives import all_gather_objects
from megatron.tensor_parallel.sharding import expert_share_of, is_added, shard_of

_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True)
class Fragment:
    """The elements of one parameter's shard that this rank keeps.

    Args:
        parameter: the shard, with its marks.
        shape: the shard's.
        start: the first of the elements in the flat shard.
        weight: the elements, in 32 bits where the optimizer keeps them so.
        owner: the tensor under which the optimizer keeps its states; None for a frozen weight.
        place: where the elements lie in the flat states.
    """

    parameter: nn.Parameter
    shape: tuple[int, ...]
    start: int
    weight: Tensor
    owner: Tensor | None
    place: slice


def names_of_states(engine: Any) -> list[list[str]]:
    """Return the parameter names of the states of an optimizer that keeps one for each weight.

    One list per group of parameters; none where ZeRO divides the states and names them itself.
    """
    if engine.optimizer is None or engine.optimizer is not engine.basic_optimizer:
        return []
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    return [[names[p] for p in group["params"]] for group in engine.optimizer.param_groups]


@torch.no_grad()
def load_full(
    engine: Any,
    checkpoint: FullCheckpoint,
    replica: dist.ProcessGroup,
    *,
    optimizer: bool,
    buffer_bytes: int,
    copies_padding: bool,
    new_head: bool = False,
) -> None:
    """Fill the weights of DeepSpeed's `engine`, and the states of its optimizer.

    Args:
        replica: the ranks that have all parameters together.
        optimizer: whether to take its states and counters; otherwise it starts anew.
        buffer_bytes: of memory in addition to the tensors that are filled.
        copies_padding: whether further rows of padding are copies of the last one; else zeros.
        new_head: whether the head of a downstream task keeps its initial weights, and those of
            other heads are not used.

    Raises:
        CheckpointError: the checkpoint has not the parameters of this network.

    Communication: every rank must call this, in step.
    """
    names = _parameters_to_fill(engine.module, checkpoint.parameters, replica, new_head=new_head)
    _require_same_names(set(names), set(checkpoint.parameters), replica, may_hold_others=new_head)
    zero = engine.optimizer
    divides_weights = engine.zero_optimization_partition_weights()
    if divides_weights:
        # Small weights are whole between steps.
        zero.checkpoint_event_prologue()
    owners: dict[Tensor, list[float]] = {}
    for name, fragment in _fragments(engine, names):
        parameter = checkpoint.parameters[name]
        shard = shard_of(fragment.parameter)
        if is_of_vocabulary(name):
            # Padding depends on the number of ranks that divide the table.
            rows = full_shape(fragment.shape, shard)[0]
            parameter = parameter.with_rows(rows, copies_last=copies_padding)
        try:
            _fill(fragment.weight, parameter.weight, fragment, buffer_bytes)
            if optimizer and fragment.owner is not None:
                _fill_states(engine.basic_optimizer, fragment, parameter, buffer_bytes)
                if parameter.steps is not None:
                    owners.setdefault(fragment.owner, []).append(parameter.steps)
        except ValueError as error:
            raise CheckpointError(f"{name} does not fit this network: {error}") from error
    if optimizer:
        _set_steps(engine.basic_optimizer, owners)
        _order_states(engine.basic_optimizer)
        _set_progress(engine, checkpoint)
    if divides_weights:
        for number, flat in enumerate(zero.fp32_partitioned_groups_flat):
            zero.fp16_partitioned_groups_flat[number].copy_(flat)
            copy_to_weights(zero, number)
        zero.checkpoint_event_epilogue()
    elif hasattr(zero, "update_lp_params"):
        zero.update_lp_params()


def _parameters_to_fill(
    module: nn.Module, stored: Collection[str], replica: dist.ProcessGroup, *, new_head: bool
) -> dict[str, Any]:
    """Return the parameters and the biases of routers by name, without those that go on with their initial weights.

    Communication: every rank must call this, in step.
    """
    names = dict(module.named_parameters())
    buffers = {name: buffer for name, buffer in module.named_buffers() if is_buffer(name)}
    new_names = {name for name, p in names.items() if is_added(p) or is_adapter(name)}
    on_all_stages = set().union(*all_gather_objects(new_names, replica))
    for is_of_kind in (is_adapter, lambda name: not is_adapter(name)):
        # The checkpoint is of a network without adapters, or of the one that this one extends.
        added = {*filter(is_of_kind, on_all_stages)}
        if added.isdisjoint(stored):
            names = {name: p for name, p in names.items() if name not in added}
    if new_head:
        names = {name: p for name, p in names.items() if not _is_of_head(name, stored)}
    return names | buffers


def _is_of_head(name: str, stored: Container[str]) -> bool:
    """Whether a parameter is of a task's head, or of the pooler and segments if none are stored."""
    if "classification_head." in name:
        return True
    return name not in stored and (".pooler." in name or "tokentype_embeddings." in name)


def _require_same_names(
    own: set[str], stored: set[str], replica: dist.ProcessGroup, *, may_hold_others: bool
) -> None:
    """Refuse a checkpoint that lacks a parameter, or holds one that no rank of a replica has."""
    wanted = set().union(*all_gather_objects(own, replica))
    if wanted - stored or (stored - wanted and not may_hold_others):
        raise CheckpointError(
            "the checkpoint holds other parameters than this network has: missing "
            f"{sorted(wanted - stored)}, unexpected {sorted(stored - wanted)}"
        )


def _fragments(
    engine: Any, parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[str, Fragment]]:
    """Yield what this rank keeps of each parameter; nothing of those that others keep."""
    if engine.zero_optimization_partition_weights():
        yield from _stage_3_fragments(engine.optimizer, parameters)
        return
    undivided = engine.optimizer is engine.basic_optimizer
    for name, parameter in parameters.items():
        shape = tuple(parameter.shape)
        everything = slice(0, parameter.numel())
        if undivided or not parameter.requires_grad:
            owner = parameter if parameter.requires_grad and engine.optimizer else None
            yield name, Fragment(parameter, shape, 0, parameter.view(-1), owner, everything)
        elif mapping := master_weight(parameter):
            (owner,) = engine.basic_optimizer.param_groups[mapping.param_group_index]["params"]
            first = mapping.hp_fragment_address.start
            place = slice(first, first + mapping.hp_fragment_address.numel)
            start = mapping.lp_fragment_address.start
            yield name, Fragment(parameter, shape, start, mapping.hp_fragment, owner, place)


def _stage_3_fragments(
    zero: Any, parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[str, Fragment]]:
    places = {}
    for flat, group in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
        first = 0
        for parameter in group:
            places[parameter] = flat, first
            first += parameter.ds_tensor.ds_numel
        if flat.numel() < first:
            raise CheckpointError(
                "a checkpoint of another layout cannot be loaded into an optimizer on nvme: load "
                "it without offload_optimizer once, save, and go on from there"
            )
    for name, parameter in parameters.items():
        if is_buffer(name):
            own = parameter.view(-1)
            yield (
                name,
                Fragment(parameter, tuple(parameter.shape), 0, own, None, slice(0, own.numel())),
            )
            continue
        shape = tuple(parameter.ds_shape)  # type: ignore[attr-defined]
        size = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
        start = size * dist.get_rank(parameter.ds_process_group)  # type: ignore[attr-defined]
        # The last ranks' shards have padding after the last element.
        size = min(size, parameter.ds_numel - start)  # type: ignore[attr-defined]
        if size <= 0:
            continue
        if parameter in places:
            flat, first = places[parameter]
            place = slice(first, first + size)
            yield name, Fragment(parameter, shape, start, flat.view(-1)[place], flat, place)
        else:
            frozen = parameter.ds_tensor.view(-1)[:size]  # type: ignore[attr-defined]
            yield name, Fragment(parameter, shape, start, frozen, None, slice(0, size))


def _fill(target: Tensor, whole: ShardedTensor, fragment: Fragment, buffer_bytes: int) -> None:
    fill_from(
        target,
        whole,
        shard_of(fragment.parameter),
        fragment.shape,
        fragment.start,
        share=expert_share_of(fragment.parameter),
        buffer_bytes=buffer_bytes,
    )


def _fill_states(
    optimizer: Any, fragment: Fragment, stored: ParameterState, buffer_bytes: int
) -> None:
    states = optimizer.state[fragment.owner]
    for name, whole in stored.states.items():
        if name not in states:
            states[name] = torch.zeros_like(fragment.owner)  # type: ignore[arg-type]
        target = states[name].view(-1)[fragment.place]
        _fill(target, whole, fragment, buffer_bytes)


def _set_steps(optimizer: Any, counts: Mapping[Tensor, list[float]]) -> None:
    """Set the step counters of the optimizer."""
    for owner, taken in counts.items():
        steps, *others = set(taken)
        if others:
            raise CheckpointError(
                f"weights that are stepped together have taken {sorted({steps, *others})} steps"
            )
        for group in optimizer.param_groups:
            if "step" in group:
                group["step"] = int(steps)
        if isinstance(optimizer, torch.optim.Adam):
            optimizer.state[owner]["step"] = torch.tensor(steps, device=owner.device)
        elif not any("step" in group for group in optimizer.param_groups):
            optimizer.state[owner]["step"] = int(steps)


def _order_states(optimizer: Any) -> None:
    """Order the states as the first step does, so that the next files have the bytes of an unbroken run."""
    loaded = dict(optimizer.state)
    in_groups = [owner for group in optimizer.param_groups for owner in group["params"]]
    first = dict.fromkeys(owner for owner in in_groups if owner in loaded)
    optimizer.state.clear()
    # ZeRO 3 has other tensors in the groups outside of a step than those that own the states.
    for owner in {**first, **dict.fromkeys(loaded)}:
        states = loaded[owner]
        step = {"step": states["step"]} if "step" in states else {}
        optimizer.state[owner] = {**step, **states}


def _set_progress(engine: Any, checkpoint: FullCheckpoint) -> None:
    """Restore DeepSpeed's counters, and a loss scale that follows overflows."""
    for name, count in checkpoint.counters.items():
        setattr(engine, name, count)
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if hasattr(scaler, "cur_iter") and "cur_iter" in checkpoint.loss_scaler:
        vars(scaler).update({name: checkpoint.loss_scaler[name] for name in _SCALE})
