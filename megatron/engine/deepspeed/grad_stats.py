"""Gradient and weight norms of the whole model, clipping, and counts of zero gradients.

A weight that several ranks of a replica hold is counted on one of them, and the norm decides whether
a step is taken. A NaN in another rank's copy is added to the norm, in the all-reduce that is made
anyway.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import safe_get_local_grad
from torch import Tensor, nn

from megatron.engine.deepspeed.patches.grad_norm import (
    ToHost,
    add_to_grad_norm,
    foreach_norm,
    foreach_scale,
    replace_bf16_norm,
    replace_partitioned_norm,
    wrap_step,
)
from megatron.engine.deepspeed.patches.grad_reduction import own_gradients
from megatron.engine.deepspeed.patches.master_weights import (
    has_master_weight,
    master_gradient,
    master_weight,
)
from megatron.tensor_parallel.process_groups import Groups
from megatron.tensor_parallel.sharding import is_expert, shard_of


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter],
    groups: Groups,
    max_norm: float,
    *,
    to_host: ToHost = Tensor.cpu,
) -> float:
    """Clip gradients by their norm over the full network, in fp32 without ZeRO.

    The network is a replica, and with it the experts of its neighbours.

    Args:
        to_host: reads the norm from the device.

    Returns:
        The norm before clipping.

    Communication: one all-reduce of a scalar over the replica; over all ranks where replicas divide
    experts.
    """
    held = [(p, p.grad) for p in parameters if p.grad is not None]
    first = [(p, g) for p, g in held if groups.expert is None or _is_first_copy(p, groups)]
    squared = squared_norm(first, groups, held[0][1].device)
    dist.all_reduce(squared, group=groups.model if groups.expert is None else None)
    norm = float(to_host(squared.sqrt()))
    scale = max_norm / (norm + 1e-6)
    if scale < 1:
        foreach_scale([grad for _, grad in held], scale)
    return norm


def squared_norm(
    gradients: Sequence[tuple[nn.Parameter, Tensor]], groups: Groups, device: torch.device
) -> Tensor:
    """Compute this rank's term of the squared norm in fp32."""
    norms = foreach_norm(counted_gradients(gradients, groups, device))
    return torch.stack([norm.float().square() for norm in norms]).sum()


def counted_gradients(
    gradients: Sequence[tuple[nn.Parameter, Tensor]], groups: Groups, device: torch.device
) -> list[Tensor]:
    """Return the gradients that this rank adds to the norm of its replica.

    A NaN in another rank's copy of a weight is among them as a scalar.
    """
    counted = [grad for p, grad in gradients if counts_here(p, groups)]
    if len(counted) < max(1, len(gradients)):
        others = [grad for p, grad in gradients if not counts_here(p, groups)]
        counted.append(nan_unless_finite(others, device))
    return counted


def counts_here(parameter: nn.Parameter, groups: Groups) -> bool:
    """Whether this rank adds `parameter` to its replica's norm, so that each weight is added once."""
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    if shard_of(parameter) is not None:
        return True
    divided = groups.expert_tensor if is_expert(parameter) else None
    return (groups.tensor if divided is None else divided).rank() == 0


def take_norm_of_all_ranks(engine: Any, groups: Groups) -> None:
    """Take the gradient norm of DeepSpeed's optimizers over all ranks at once.

    DeepSpeed takes a collective for each parameter group, and waits forever where a pipeline stage does
    not have one that others have: no experts, or norms, or matrices. In bf16 it counts biases of
    experts on every tensor-parallel rank.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, BF16_Optimizer):
        replace_bf16_norm(
            optimizer, lambda: counted_gradients(own_gradients(optimizer), groups, engine.device)
        )
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        replace_partitioned_norm(
            optimizer, lambda gradients, device: squared_norm(gradients, groups, device)
        )


def watch_replicated_weights(engine: Any, groups: Groups) -> None:
    """Let a NaN in any rank's copy of a weight reach the gradient norm of DeepSpeed's optimizers.

    A scalar, 0 or NaN, is added to the gradients as if it were that of a weight which this rank
    counts.
    """
    if groups.topology.tensor == 1:
        return

    def scalar(pairs: Sequence[tuple[nn.Parameter, Tensor]], device: torch.device) -> Tensor:
        return nan_unless_finite([g for p, g in pairs if not counts_here(p, groups)], device)

    add_to_grad_norm(engine.optimizer, scalar)


def nan_unless_finite(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Compute 0 if all gradients are finite, else NaN, without waiting for the device."""
    zero = torch.zeros((), device=device)
    if not gradients:
        return zero
    total = torch.stack([gradient.detach().float().norm() for gradient in gradients]).sum()
    return torch.where(total.isfinite(), zero, torch.nan)


class HostScalars:
    """Read the scalars of a step from the device in one transfer: gradient norm, loss.

    The norm decides on the host whether a step is taken, so it is waited for; what is known by then
    comes with it.
    """

    def __init__(self) -> None:
        self._pending: tuple[Tensor, ...] = ()
        self._values: list[Tensor] = []

    def expect(self, *scalars: Tensor) -> None:
        """Read these scalars of the device with the next norm."""
        self._pending, self._values = scalars, []

    def to_host(self, norm: Tensor) -> Tensor:
        """Copy the norm, or one of each parameter group, and the expected scalars to the host."""
        tensors = (norm, *self._pending)
        # Doubles hold all narrower values exactly.
        flat = [tensor.detach().reshape(-1).double() for tensor in tensors]
        if len({tensor.device for tensor in flat}) > 1:
            # The norm of an offloaded optimizer is on the host already.
            flat = [tensor.cpu() for tensor in flat]
        together = torch.cat(flat).cpu()
        own, *others = together.split([tensor.numel() for tensor in tensors])
        self._values = [
            value.to(tensor.dtype).reshape(tensor.shape)
            for value, tensor in zip(others, self._pending, strict=True)
        ]
        self._pending = ()
        return own.to(norm.dtype).reshape(norm.shape)

    def take(self) -> list[Tensor]:
        """Return the expected scalars on the host; fp16 may have skipped the norm."""
        if self._pending:
            self.to_host(torch.zeros((), device=self._pending[0].device))
        taken, self._values = self._values, []
        return taken


@torch.no_grad()
def params_norm(parameters: Iterable[Any], groups: Groups) -> float:
    """Compute the L2 norm of all weights of the model.

    Communication: one all-reduce of a scalar over all ranks.
    """
    counted = [p for p in parameters if counts_here(p, groups)]
    pieces = [
        _without_padding(p, p.ds_tensor) if _is_partitioned(p) else p.detach()
        for p in counted
        if _is_partitioned(p) or _is_first_copy(p, groups)
    ]
    squares = (piece.float().square().sum(dtype=torch.float64) for piece in pieces)
    return float(_over_all_ranks(squares, groups)) ** 0.5


class ZeroCounter:
    """Count zero gradients of each step, just before the optimizer takes it (--log-num-zeros-in-grad).

    Args:
        engine: DeepSpeed's; its optimizer's step is wrapped.
        num_padding: weights of the full model whose gradient is always zero, which do not count.
    """

    def __init__(self, engine: Any, groups: Groups, num_padding: int):
        self.count = 0.0  # of the last step
        self._parameters = [p for p in engine.module.parameters() if p.requires_grad]
        self._groups = groups
        self._num_padding = num_padding
        wrap_step(engine.optimizer, self._step)

    def _step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.count = self._count() - self._num_padding
        return step(*args, **kwargs)

    @torch.no_grad()
    def _count(self) -> float:
        """Count zeros. Communication: one all-reduce over all ranks."""
        counted = [p for p in self._parameters if counts_here(p, self._groups)]
        pieces = (self._gradient(p) for p in counted)
        zeros = ((g.numel() - g.count_nonzero()).double() for g in pieces if g is not None)
        return float(_over_all_ranks(zeros, self._groups))

    def _gradient(self, parameter: Any) -> Tensor | None:
        """Return the shard of the reduced gradient that this rank counts."""
        if _is_partitioned(parameter):
            return _without_padding(parameter, safe_get_local_grad(parameter))
        if not has_master_weight(parameter):
            return parameter.grad if _is_first_copy(parameter, self._groups) else None
        mapping = master_weight(parameter)
        if mapping is None:
            return None
        piece = master_gradient(parameter).flatten()
        address = mapping.lp_fragment_address
        return (
            piece
            if piece.numel() == address.numel
            else piece[address.start : address.start + address.numel]
        )


def _is_first_copy(parameter: Any, groups: Groups) -> bool:
    """Whether this rank counts a weight that other replicas hold as well."""
    copies = groups.expert_data if is_expert(parameter) else None
    return (groups.data_and_sequence if copies is None else copies).rank() == 0


def _is_partitioned(parameter: Any) -> bool:
    """Whether ZeRO-3 has partitioned this weight over the replicas."""
    return hasattr(parameter, "ds_tensor")


def _without_padding(parameter: Any, piece: Tensor) -> Tensor:
    """Strip the padding from this rank's shard of a weight that ZeRO-3 has partitioned."""
    size = parameter.ds_tensor.ds_numel
    start = size * dist.get_rank(parameter.ds_process_group)
    return piece.flatten()[: max(0, min(size, parameter.ds_numel - start))]


def _over_all_ranks(terms: Iterable[Tensor], groups: Groups) -> Tensor:
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    total = torch.zeros((), dtype=torch.float64, device=device)
    for term in terms:
        total += term
    dist.all_reduce(total)
    return total
