"""The optimizer, from its plan."""

import torch
from torch import nn

from megatron.optim.param_groups import param_groups
from megatron.plan.run_plan import OptimizerPlan


def build_optimizer(model: nn.Module, plan: OptimizerPlan, lr: float) -> torch.optim.Optimizer:
    """Return the optimizer of this rank's parameters.

    adam is Adam with decoupled weight decay, in one pass over memory per parameter.

    Source: arXiv:1711.05101, algorithm 2.
    """
    groups = param_groups(model, plan.weight_decay)
    if plan.name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=plan.momentum)
    return torch.optim.AdamW(
        groups, lr=lr, betas=(plan.beta1, plan.beta2), eps=plan.eps, fused=True
    )
