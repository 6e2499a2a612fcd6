"""Build the optimizer from its plan: Adam, SGD, Muon, 8-bit Adam; Lion is in a file of its own."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.common.registry import OPTIMIZERS
from megatron.config.optimization.optimizer import OptimizerPlan
from megatron.optimizer.muon import Muon, muon_scale
from megatron.optimizer.param_groups import plan_groups

Groups = list[dict[str, Any]]
"""Parameter groups of torch's optimizers."""


def build_optimizer(
    model: nn.Module,
    plan: OptimizerPlan,
    lr: float,
    *,
    tensor_group: dist.ProcessGroup,
    dtype: torch.dtype = torch.float32,
) -> torch.optim.Optimizer:
    """Build the optimizer of this rank's parameters; DeepSpeed's own are built by the engine.

    Args:
        tensor_group: tensor-parallel ranks.
        dtype: of the network.
    """
    build = OPTIMIZERS.get(plan.name, plan.own_flags)
    optimizer: torch.optim.Optimizer = build(
        plan_groups(model, plan), lr, plan, tensor_group=tensor_group, dtype=dtype
    )
    return optimizer


@OPTIMIZERS.register("adam")
@OPTIMIZERS.register("adamw")
@OPTIMIZERS.register("fused_adam")
def adam(groups: Groups, lr: float, plan: OptimizerPlan, **_: Any) -> torch.optim.Optimizer:
    """Return torch's fused AdamW, or apex's.

    Source: arXiv:1711.05101, algorithm 2.
    """
    betas = (plan.beta1, plan.beta2)
    if plan.impl == "apex":
        from apex.optimizers import FusedAdam

        return FusedAdam(groups, lr=lr, betas=betas, eps=plan.eps, adam_w_mode=True)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=plan.eps, fused=True)


@OPTIMIZERS.register("adam8bit")
def adam8bit(groups: Groups, lr: float, plan: OptimizerPlan, **_: Any) -> torch.optim.Optimizer:
    """Return the AdamW of bitsandbytes, whose state has 8 bits."""
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(groups, lr=lr, betas=(plan.beta1, plan.beta2), eps=plan.eps)


@OPTIMIZERS.register("sgd")
def sgd(groups: Groups, lr: float, plan: OptimizerPlan, **_: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(groups, lr=lr, momentum=plan.momentum)


@OPTIMIZERS.register("muon")
@OPTIMIZERS.register("dist_muon")
def muon(
    groups: Groups, lr: float, plan: OptimizerPlan, *, dtype: torch.dtype, **_: Any
) -> torch.optim.Optimizer:
    """Return Muon for matrices with AdamW for the other parameters."""
    return Muon(
        groups,
        lr,
        betas=(plan.beta1, plan.beta2),
        eps=plan.eps,
        momentum=plan.muon.momentum,
        nesterov=plan.muon.nesterov,
        steps=plan.muon.steps,
        scale=muon_scale(plan.muon.scale_mode, plan.muon.extra_scale),
        dtype=dtype,
    )
