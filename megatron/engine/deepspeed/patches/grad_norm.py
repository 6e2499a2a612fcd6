"""Patches for the gradient norm, clipping, and the optimizer step that they decide on."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn

from megatron.engine.deepspeed.patches.master_weights import master_gradient

ToHost = Callable[[Tensor], Tensor]
"""Copies a tensor to host memory, which waits for the device."""

Scalar = Callable[[Sequence[tuple[nn.Parameter, Tensor]], torch.device], Tensor]
"""Computes a scalar from parameters and their gradients, on a device."""


def wrap_step(optimizer: Any, wrapper: Callable[..., Any]) -> None:
    """Call `wrapper(step, ...)` where DeepSpeed calls `optimizer.step(...)`."""
    step = optimizer.step

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(step, *args, **kwargs)

    optimizer.step = wrapped


def drop_refused_gradients(optimizer: Any) -> None:
    """Drop the gradients of a refused step with CPU offload (`reset_cpu_buffers`).

    ZeRO stages 1 and 2 keep them in their buffers and add those of the next step, so that a NaN
    stays and every further step is refused.
    """
    if not hasattr(optimizer, "_release_preflattened_grad_buffers"):
        return
    reset = optimizer.reset_cpu_buffers

    def reset_all() -> None:
        reset()
        for group in optimizer.averaged_gradients:
            optimizer.averaged_gradients[group] = None

    optimizer.reset_cpu_buffers = reset_all


def grad_norm_of_step(engine: Any) -> Any:
    """Return the global gradient norm of the step being taken (`_global_grad_norm`).

    ZeRO and the bf16 optimizer keep it themselves; `get_global_grad_norm` is set after the step.
    """
    optimizer = engine.optimizer
    holder = optimizer if hasattr(optimizer, "_global_grad_norm") else engine
    return holder._global_grad_norm


def foreach_norm(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Compute the L2 norm of each tensor in one kernel launch (`_foreach_norm`)."""
    return torch._foreach_norm(tensors)


def foreach_scale(tensors: list[Tensor], factor: float) -> None:
    """Multiply all tensors in place, in one kernel launch (`_foreach_mul_`)."""
    torch._foreach_mul_(tensors, factor)


def replace_fp32_clipping(engine: Any, clip: Callable[[], float]) -> None:
    """Clip with `clip`, which returns the norm, in fp32 without ZeRO (`clip_fp32_gradients`).

    DeepSpeed keeps the norm of its own optimizers only, and counts a weight that two pipeline stages
    share twice.
    """

    def clip_and_keep_norm() -> None:
        engine._global_grad_norm = clip()

    engine.clip_fp32_gradients = clip_and_keep_norm


def read_norm_once(optimizer: Any, to_host: ToHost) -> None:
    """Move the gradient norm to the host before DeepSpeed looks at it, clips by it and keeps it.

    On a GPU each look at the device's norm would wait for all work launched so far.

    Args:
        optimizer: DeepSpeed's; wrapped are ZeRO's `scaled_global_norm` or `_get_norm_groups`, and
            during a step of the bf16 optimizer the function `get_global_norm_of_tensors`.
    """
    if isinstance(optimizer, BF16_Optimizer):
        wrap_step(optimizer, partial(_with_host_norm, to_host))
    elif hasattr(optimizer, "_get_norm_groups"):
        group_norms = optimizer._get_norm_groups
        optimizer._get_norm_groups = lambda: [*to_host(torch.stack(group_norms()))]
    elif hasattr(optimizer, "scaled_global_norm"):
        global_norm = optimizer.scaled_global_norm
        optimizer.scaled_global_norm = lambda: to_host(global_norm())


def _with_host_norm(to_host: ToHost, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    usual = bf16_optimizer.get_global_norm_of_tensors
    bf16_optimizer.get_global_norm_of_tensors = lambda *a, **k: to_host(usual(*a, **k))
    try:
        return step(*args, **kwargs)
    finally:
        bf16_optimizer.get_global_norm_of_tensors = usual


def add_to_grad_norm(optimizer: Any, scalar: Scalar) -> None:
    """Add a scalar to the gradients of which DeepSpeed's optimizer takes the global norm.

    In fp16 DeepSpeed looks at all gradients itself (`get_grads_for_norm`, `get_grad_norm_direct`).
    """
    if hasattr(optimizer, "get_grads_for_norm"):
        _add_to_bf16_norm(optimizer, scalar)
    elif hasattr(optimizer, "get_grad_norm_direct"):
        marker = _Marker()
        _add_to_zero_norm(optimizer, scalar, marker)
        _add_to_offload_norm(optimizer, scalar, marker)


def replace_bf16_norm(optimizer: Any, gradients: Callable[[], list[Tensor]]) -> None:
    """Take the norm of the bf16 optimizer over all ranks (`get_grads_for_norm`).

    Args:
        gradients: returns those of this rank; each weight is among those of one rank.
    """
    grads_for_norm = optimizer.get_grads_for_norm

    def found(for_clipping: bool = False) -> Any:
        return grads_for_norm(for_clipping=True) if for_clipping else (gradients(), {})

    optimizer.get_grads_for_norm = found
    optimizer.mpu = _AllRanks


class _AllRanks:
    """Model-parallel unit over whose ranks the bf16 optimizer sums the norm."""

    @staticmethod
    def get_model_parallel_group() -> Any:
        return dist.group.WORLD


def replace_partitioned_norm(
    optimizer: Any,
    squared: Callable[[Sequence[tuple[nn.Parameter, Tensor]], torch.device], Tensor],
) -> None:
    """Take the norm of ZeRO 1 and 2 over all ranks at once (`scaled_global_norm`).

    Args:
        squared: returns this rank's term of the squared norm on a device, from its parameters and the
            gradients of its fragments, or their norms with CPU offload.
    """

    def norm() -> Tensor:
        params = [param for group in optimizer.params_in_partition for param in group]
        if optimizer.cpu_offload:
            found = _offloaded_norms(optimizer, params)
        else:
            found = [(param, master_gradient(param)) for param in params]
        device = torch.device(optimizer.device)
        total = squared(found, device).to(get_accelerator().current_device_name())
        dist.all_reduce(total)
        return torch.where(total.isfinite(), total.sqrt(), -1).to(device)

    optimizer.scaled_global_norm = norm


class _Marker:
    """Stands for the scalar among parameters: DeepSpeed counts it on every rank."""

    tensor_model_parallel = True
    ds_id = -1


def _add_to_bf16_norm(optimizer: Any, scalar: Scalar) -> None:
    usual = optimizer.get_grads_for_norm

    def grads_and_scalar(for_clipping: bool = False) -> Any:
        found = usual(for_clipping=for_clipping)
        if for_clipping:
            return found
        dense, expert_grads = found
        groups = zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True)
        pairs = [pair for params, grads in groups for pair in zip(params, grads, strict=True)]
        device = next(grad for _, grad in pairs).device
        return [*dense, scalar(pairs, device)], expert_grads

    optimizer.get_grads_for_norm = grads_and_scalar


def _add_to_zero_norm(optimizer: Any, scalar: Scalar, marker: _Marker) -> None:
    """Change the norm of gradients that ZeRO has partitioned over the replicas."""
    usual = optimizer.get_grad_norm_direct

    def norm(gradients: Sequence[Tensor], params: Sequence[Any], **options: Any) -> Tensor:
        kept = [grad for grad in gradients if not getattr(grad, "_zero_padding", False)]
        extra = scalar([*zip(params, kept, strict=False)], optimizer.device)
        return usual([extra, *kept], [_like(params, marker), *params], **options)

    optimizer.get_grad_norm_direct = norm


def _add_to_offload_norm(optimizer: Any, scalar: Scalar, marker: _Marker) -> None:
    """Change the norm of gradients on the CPU, whose own norms DeepSpeed keeps by parameter."""
    usual = optimizer.complete_grad_norm_calculation_for_cpu_offload

    def norm(params: Sequence[Any]) -> Tensor:
        norms = optimizer.norm_for_param_grads
        pairs = _offloaded_norms(optimizer, params)
        if hasattr(optimizer, "param_id"):
            optimizer.param_id[id(marker)] = marker.ds_id
        norms[marker.ds_id] = scalar(pairs, torch.device("cpu"))
        return usual([_like(params, marker), *params])

    optimizer.complete_grad_norm_calculation_for_cpu_offload = norm


def _offloaded_norms(optimizer: Any, params: Sequence[Any]) -> list[tuple[Any, Tensor]]:
    """Return the norms of gradients on the CPU (`norm_for_param_grads`)."""
    norms = optimizer.norm_for_param_grads
    return [
        (param, torch.as_tensor(norms[number]))
        for param in params
        if (number := optimizer.get_param_id(param)) in norms
    ]


def _like(params: Sequence[Any], marker: _Marker) -> _Marker:
    """Give the marker the process group over which ZeRO stage 3 partitions `params`."""
    if params and hasattr(params[0], "ds_process_group"):
        marker.ds_process_group = params[0].ds_process_group  # type: ignore[attr-defined]
    return marker
