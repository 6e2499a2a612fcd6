"""Patches for gradient reduction over the replicas, and the gathering of stepped weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from megatron.engine.deepspeed.patches.grad_norm import replace_bf16_norm
from megatron.engine.deepspeed.patches.master_weights import master_gradient, master_weight
from megatron.engine.deepspeed.patches.pipeline import wrap_instructions


@contextmanager
def without_memory_reports() -> Iterator[None]:
    """Build the bf16 optimizer without its reports of memory (`see_memory_usage`).

    It has two for each parameter group, and for each of them Python collects garbage.
    """
    usual = bf16_optimizer.see_memory_usage
    bf16_optimizer.see_memory_usage = lambda *args, **kwargs: None
    try:
        yield
    finally:
        bf16_optimizer.see_memory_usage = usual


def skip_allreduce(engine: Any) -> None:
    """Reduce no gradients where there is one replica (`enable_backward_allreduce`).

    DeepSpeed would still copy every gradient into a buffer and back.
    """
    engine.enable_backward_allreduce = False
    engine.pipeline_enable_backward_allreduce = False


def skip_lone_all_reduce(engine: Any) -> None:
    """Leave gradients in place where the group that would sum them is one rank.

    DeepSpeed copies all of them into a buffer and back there (`allreduce_no_retain`). Experts that
    one rank has are divided by the number of replicas all the same.
    """
    reduce = engine.allreduce_no_retain

    def reduce_over_ranks(bucket: Sequence[Tensor], dp_group: Any, **sizes: Any) -> None:
        ranks, replicas = dist.get_world_size(dp_group), sizes.get("dp_world_size") or 1
        is_alone = ranks == replicas == engine.gradient_predivide_factor() == 1
        if not is_alone or any(x.dtype != engine.communication_data_type for x in bucket):
            reduce(bucket, dp_group, **sizes)

    engine.allreduce_no_retain = reduce_over_ranks


def shorten_gradient_path(optimizer: Any) -> None:
    """Read and write each gradient of the bf16 optimizer less often, with the same results.

    A 16-bit gradient is added to its fp32 sum in one operation instead of through an fp32 copy
    (`_update_hp_grad`); of the sums this rank clips those of its partition, in one operation, as it
    steps on no others (`get_grads_for_norm`); and they are zeroed once (`clear_hp_grads`).
    """
    if not isinstance(optimizer, BF16_Optimizer):
        return
    usual, clear = optimizer.get_grads_for_norm, optimizer.clear_hp_grads

    @torch.no_grad()
    def add(weight: Any, group: int, index: int, clear_lp_grads: bool) -> None:
        if weight.grad is None:
            return
        weight._hp_grad = total = optimizer.fp32_groups_gradients[group][index]
        total.add_(weight.grad.reshape(total.shape))
        optimizer.fp32_groups_has_gradients[group][index] = True
        if clear_lp_grads:
            weight.grad.zero_()

    def gradients(for_clipping: bool = False) -> Any:
        return optimizer.fp32_groups_gradient_flat_partition if for_clipping else usual()

    def clear_if_any() -> None:
        if any(map(any, optimizer.fp32_groups_has_gradients)):
            clear()

    optimizer._update_hp_grad = add
    optimizer.get_grads_for_norm = gradients
    optimizer.clear_hp_grads = clear_if_any


def keeps_reduced_partition(optimizer: Any) -> bool:
    """Whether a rank has all its reduced gradients on its device before the step: ZeRO 1 and 2."""
    return isinstance(optimizer, DeepSpeedZeroOptimizer) and not optimizer.cpu_offload


def reduced_partition(parameters: Sequence[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
    """Return the slice of each reduced gradient that this rank owns at ZeRO 1 and 2, before the step."""
    return [(p, master_gradient(p)) for p in parameters if master_weight(p) is not None]


def own_gradients(optimizer: Any) -> list[tuple[nn.Parameter, Tensor]]:
    """Return the slice of every reduced gradient of the bf16 optimizer that this rank owns."""
    found = []
    for group, parameters in enumerate(optimizer.bf16_groups):
        partitions = optimizer.fp32_groups_gradient_flat_partition[group]
        flat = optimizer.fp32_groups_gradients_flat[group]
        first = partitions.storage_offset() - flat.storage_offset()
        start = 0
        for parameter in parameters:
            begin, end = (
                max(start, first),
                min(start + parameter.numel(), first + partitions.numel()),
            )
            if begin < end:
                found.append((parameter, flat[begin:end]))
            start += parameter.numel()
    return found


def replica_groups(optimizer: Any) -> list[dist.ProcessGroup]:
    """Return the ranks over which the bf16 optimizer divides each parameter group.

    Those of divided experts are fewer (`real_dp_process_group`).
    """
    groups: list[dist.ProcessGroup] = optimizer.real_dp_process_group
    return groups


def weight_partitions(optimizer: Any) -> list[Tensor]:
    """Return this rank's part of the weights of each parameter group (`bf16_partitioned_groups`)."""
    parts = zip(replica_groups(optimizer), optimizer.bf16_partitioned_groups, strict=True)
    return [partitions[group.rank()] for group, partitions in parts]


def replace_bf16_reduction(
    engine: Any,
    *,
    ready: Callable[[nn.Parameter], None],
    finish: Callable[[], None],
    norm_gradients: Callable[[], list[Tensor]],
    backward_begins: Callable[[], None],
) -> None:
    """Reduce the gradients of the bf16 optimizer in another way (`accumulate_hp_grads_and_remove_lp`).

    DeepSpeed sums those of weights that pipeline stages share no more (`_INSTRUCTION_MAP`).

    Args:
        ready: called with each parameter whose gradient has been added to its sum.
        finish: called where DeepSpeed would reduce all of them (`buffered_allreduce_fallback`).
        norm_gradients: returns the gradients of which all ranks together make the norm.
        backward_begins: called before each pass of a pipeline stage that adds to gradients
            (`_INSTRUCTION_MAP`).
    """
    optimizer = engine.optimizer
    accumulate = optimizer.accumulate_hp_grads_and_remove_lp

    def accumulate_and_reduce(parameter: nn.Parameter, group: int, index: int) -> None:
        accumulate(parameter, group, index)
        ready(parameter)

    def replace(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        if name == "ReduceTiedGrads":
            return lambda *args, **kwargs: None
        if name not in ("BackwardPass", "WeightPass"):
            return call

        def backward(*args: Any, **kwargs: Any) -> Any:
            backward_begins()
            return call(*args, **kwargs)

        return backward

    optimizer.accumulate_hp_grads_and_remove_lp = accumulate_and_reduce
    engine.buffered_allreduce_fallback = lambda grads=None, elements_per_buffer=0: finish()
    replace_bf16_norm(optimizer, norm_gradients)
    if hasattr(engine, "_INSTRUCTION_MAP"):
        wrap_instructions(engine, replace)


def replace_weight_gather(optimizer: Any, gather: Callable[[], None]) -> None:
    """Gather the stepped weights of the bf16 optimizer with `gather` (`update_lp_params`)."""

    @torch.no_grad()
    def copy_and_gather() -> None:
        stepped = optimizer.fp32_groups_flat_partition
        for weights, master in zip(weight_partitions(optimizer), stepped, strict=True):
            weights.copy_(master)
        gather()

    optimizer.update_lp_params = copy_and_gather
