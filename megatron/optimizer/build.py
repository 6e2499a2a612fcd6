"""Build the optimizer from its plan: Adam, SGD, Lion, Muon, 8-bit Adam."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.common.registry import OPTIMIZERS
from megatron.config.optimization.optimizer import OptimizerPlan
from megatron.optimizer.lion import Lion
from megatron.optimizer.muon import Muon, muon_scale
from megatron.optimizer.param_groups import plan_groups


def build_optimizer(
    model: nn.Module,
    plan: OptimizerPlan,
    lr: float,
    *,
    tensor_group: dist.ProcessGroup,
    dtype: torch.dtype = torch.float32,
) -> torch.optim.Optimizer:
    """Build the optimizer of this rank's parameters; DeepSpeed's own are built by the engine.

    adam is torch's fused AdamW.

    Args:
        tensor_group: tensor-parallel ranks.
        dtype: of the network.

    Source: arXiv:1711.05101, algorithm 2.
    """
    groups = plan_groups(model, plan)
    betas = (plan.beta1, plan.beta2)
    if plan.name in OPTIMIZERS:
        return OPTIMIZERS.get(plan.name, plan.own_flags)(groups, lr, plan)
    match plan.name, plan.impl:
        case "sgd", _:
            return torch.optim.SGD(groups, lr=lr, momentum=plan.momentum)
        case "lion", _:
            return Lion(groups, lr, betas=betas)
        case "muon", _:
            return Muon(
                groups,
                lr,
                betas=betas,
                eps=plan.eps,
                momentum=plan.muon.momentum,
                nesterov=plan.muon.nesterov,
                steps=plan.muon.steps,
                scale=muon_scale(plan.muon.scale_mode, plan.muon.extra_scale),
                dim_of=shard_dim,
                tensor_group=tensor_group,
                dtype=dtype,
            )
        case "adam8bit", _:
            return _bitsandbytes_adam(groups, lr, betas, plan.eps)
        case _, "apex":
            return _apex_adam(groups, lr, betas, plan.eps)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=plan.eps, fused=True)


def shard_dim(parameter: Tensor) -> int | None:
    """Return the dimension along which `parameter` is sharded; None if it is replicated."""
    shard = getattr(parameter, "shard", None)
    return None if shard is None else shard.dim


def _apex_adam(
    groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    from apex.optimizers import FusedAdam

    return FusedAdam(groups, lr=lr, betas=betas, eps=eps, adam_w_mode=True)


def _bitsandbytes_adam(
    groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(groups, lr=lr, betas=betas, eps=eps)
