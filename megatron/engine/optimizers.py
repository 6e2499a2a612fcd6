"""Optimizers out of DeepSpeed, and what it does to those that are not its own."""

import logging
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import nn

from megatron.common.errors import ConfigError
from megatron.config.optimization.optimizer import OptimizerPlan
from megatron.engine.deepspeed.patches.master_weights import mark_without_gradient
from megatron.engine.freezing import freeze
from megatron.optimizer.build import build_optimizer
from megatron.optimizer.muon import FlatLayout, MatrixSlice, Muon
from megatron.optimizer.param_groups import in_buckets, plan_groups

log = logging.getLogger(__name__)


def engine_optimizer(
    model: nn.Module,
    plan: OptimizerPlan,
    lr: float,
    *,
    tensor_group: dist.ProcessGroup,
    dtype: torch.dtype = torch.float32,
    module_name: Callable[[str], str] = str,
    adapters_only: bool = False,
) -> torch.optim.Optimizer:
    """Freeze what is not trained, and return the optimizer of this rank's other parameters.

    See `megatron.engine.freezing.freeze` and build_optimizer.
    """
    freeze(model, plan, module_name, adapters_only=adapters_only)
    if plan.impl == "deepspeed":
        optimizer = deepspeed_optimizer(model, plan, lr)
    else:
        optimizer = build_optimizer(model, plan, lr, tensor_group=tensor_group, dtype=dtype)
    for frozen in (p for p in model.parameters() if not p.requires_grad):
        mark_without_gradient(frozen)
    return optimizer


def deepspeed_optimizer(model: nn.Module, plan: OptimizerPlan, lr: float) -> torch.optim.Optimizer:
    """Return DeepSpeed's Adam or Lion, that for the host when the plan steps there.

    The first use on a machine compiles it, for a minute.

    Raises:
        ConfigError: it cannot be compiled here.
    """
    groups = plan_groups(model, plan)
    constants: dict[str, Any] = {"lr": lr, "betas": (plan.beta1, plan.beta2)}
    if plan.name == "adam":
        constants["eps"] = plan.eps
    kind = {
        ("adam", False): FusedAdam,
        ("adam", True): DeepSpeedCPUAdam,
        ("lion", False): FusedLion,
        ("lion", True): DeepSpeedCPULion,
    }[plan.name, plan.on_cpu]
    log.info(
        "loading DeepSpeed's %s: its first use on a machine compiles it, for a minute or more",
        kind.__name__,
    )
    try:
        return kind(groups, **constants)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"DeepSpeed's {plan.name} cannot be built here ({error}); write --optimizer-impl "
            "torch, or --cpu_torch_adam with --cpu-optimizer"
        ) from error


def cut_into_buckets(
    optimizer: torch.optim.Optimizer, size: int, *, alone: frozenset[nn.Parameter]
) -> None:
    """Make a parameter group of each bucket that the bf16 optimizer reduces and gathers; see in_buckets."""
    optimizer.param_groups[:] = in_buckets(optimizer.param_groups, size, alone)


def constants_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return the hyperparameters of each parameter group but the learning rate; [] without optimizer.

    That belongs to the last step, and comes with the state of the optimizer.
    """
    groups = optimizer.param_groups if optimizer else []
    varying = ("params", "lr")
    return [{k: v for k, v in group.items() if k not in varying} for group in groups]


def put_constants(optimizer: Any, constants: list[dict[str, Any]], *, clip: float) -> None:
    """Restore this run's hyperparameters: DeepSpeed loads those of the run that saved.

    Args:
        clip: largest norm of the gradient; 0 for no limit.
    """
    if optimizer is None:
        return
    for group, own in zip(optimizer.param_groups, constants, strict=True):
        group.update(own)
    if hasattr(optimizer, "clip_grad"):
        optimizer.clip_grad = clip


def forget_moments(optimizer: torch.optim.Optimizer) -> None:
    """Reset the optimizer state to that before the first step."""
    for state in optimizer.state.values():
        for name, value in state.items():
            # The quantization tables of bitsandbytes' 8-bit states are constants.
            if not name.startswith("qmap"):
                state[name] = torch.zeros_like(value) if torch.is_tensor(value) else 0


def lay_out_matrices(optimizer: Muon, engine: Any) -> None:
    """Give Muon the position of its matrices in the flat tensors of ZeRO stages 1 and 2."""
    zero = engine.optimizer
    if zero is optimizer:
        return
    for number, group in enumerate(optimizer.param_groups):
        if group["orthogonal"]:
            pieces = [MatrixSlice.of(*place) for place in _places(zero, number)]
            (flat,) = group["params"]
            optimizer.lay_out(flat, FlatLayout(pieces, zero.real_dp_process_group[number]))


def _places(zero: Any, group: int) -> Iterator[tuple[nn.Parameter, int]]:
    """Yield the parameters of a group with their offsets in its flat tensor."""
    if isinstance(zero, BF16_Optimizer):
        parameters = zero.bf16_groups[group]
        starts = accumulate((p.numel() for p in parameters[:-1]), initial=0)
    else:
        parameters = zero.round_robin_bit16_groups[group]
        starts = zero.round_robin_bit16_offsets[group]
    yield from zip(parameters, starts, strict=True)
