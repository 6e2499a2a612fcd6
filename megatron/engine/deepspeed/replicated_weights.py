"""Weights that several ranks of a replica hold: which rank counts them, and whether all are finite.

The gradient norm counts such a weight on one rank, and the norm decides whether a step is taken. A
NaN in another rank's copy reaches the norm here, in the all-reduce that DeepSpeed makes anyway.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.tensor_parallel.process_groups import Groups
from megatron.tensor_parallel.sharding import shard_of


def counts_here(parameter: nn.Parameter, groups: Groups) -> bool:
    """Whether this rank adds `parameter` to its replica's norm, so that each weight is added once."""
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return shard_of(parameter) is not None or groups.tensor_rank == 0


def nan_unless_finite(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return 0 where all gradients are finite, else NaN; the device is not waited for."""
    zero = torch.zeros((), device=device)
    if not gradients:
        return zero
    total = torch.stack([gradient.detach().float().norm() for gradient in gradients]).sum()
    return torch.where(total.isfinite(), zero, torch.nan)


def count_replicated(engine: Any, groups: Groups) -> None:
    """Let every rank's copies of a weight decide about a step in the optimizers of DeepSpeed.

    A scalar, 0 or NaN, is added to the gradients of which `engine.optimizer` takes the norm, as if
    it were that of a weight that this rank counts. In fp16 DeepSpeed looks at all gradients itself.
    """
    optimizer = engine.optimizer
    if groups.topology.tensor * groups.topology.pipeline == 1:
        return
    if hasattr(optimizer, "get_grads_for_norm"):
        optimizer.get_grads_for_norm = _of_bf16(optimizer, groups)
    elif hasattr(optimizer, "get_grad_norm_direct"):
        marker = _Marker()
        optimizer.get_grad_norm_direct = _of_zero(optimizer, groups, marker)
        kept = optimizer.complete_grad_norm_calculation_for_cpu_offload
        optimizer.complete_grad_norm_calculation_for_cpu_offload = _of_offload(
            optimizer, groups, marker, kept
        )


class _Marker:
    """Stands among parameters for the scalar: DeepSpeed counts it on every rank."""

    tensor_model_parallel = True
    ds_id = -1


def _of_bf16(optimizer: Any, groups: Groups) -> Callable[..., Any]:
    """Return the gradients of the optimizer of bf16 without ZeRO, with the scalar."""
    gradients_for_norm = optimizer.get_grads_for_norm

    def with_scalar(for_clipping: bool = False) -> Any:
        found = gradients_for_norm(for_clipping=for_clipping)
        if for_clipping:
            return found
        own, of_experts = found
        uncounted = [
            gradient
            for group, gradients in zip(
                optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True
            )
            for parameter, gradient in zip(group, gradients, strict=True)
            if not counts_here(parameter, groups)
        ]
        device = next(g.device for group in optimizer.fp32_groups_gradients for g in group)
        return [*own, nan_unless_finite(uncounted, device)], of_experts

    return with_scalar


def _of_zero(optimizer: Any, groups: Groups, marker: _Marker) -> Callable[..., Tensor]:
    """Return the norm of gradients that ZeRO has divided over the replicas, with the scalar."""
    norm_of = optimizer.get_grad_norm_direct

    def with_scalar(gradients: Sequence[Tensor], params: Sequence[Any], **options: Any) -> Tensor:
        kept = [g for g in gradients if not getattr(g, "_zero_padding", False)]
        uncounted = [g for g, p in zip(kept, params, strict=False) if not counts_here(p, groups)]
        scalar = nan_unless_finite(uncounted, optimizer.device)
        return norm_of([scalar, *kept], [_beside(marker, params), *params], **options)

    return with_scalar


def _of_offload(
    optimizer: Any, groups: Groups, marker: _Marker, norm_of: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Return the norm of gradients that lie on the CPU, whose norms DeepSpeed keeps by parameter."""

    def with_scalar(params: Sequence[Any]) -> Tensor:
        norms = optimizer.norm_for_param_grads
        uncounted = [
            torch.as_tensor(norms[number])
            for p in params
            if not counts_here(p, groups) and (number := optimizer.get_param_id(p)) in norms
        ]
        if hasattr(optimizer, "param_id"):
            optimizer.param_id[id(marker)] = marker.ds_id
        norms[marker.ds_id] = nan_unless_finite(uncounted, torch.device("cpu"))
        return norm_of([_beside(marker, params), *params])

    return with_scalar


def _beside(marker: _Marker, params: Sequence[Any]) -> _Marker:
    """Return the marker as one of `params`, which ZeRO stage 3 divides over one group."""
    if params and hasattr(params[0], "ds_process_group"):
        marker.ds_process_group = params[0].ds_process_group  # type: ignore[attr-defined]
    return marker
