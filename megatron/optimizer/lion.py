"""Lion optimizer: updates by the sign of the momentum."""

from collections.abc import Callable
from typing import Any

import torch

from megatron.common.registry import OPTIMIZERS
from megatron.config.optimization.optimizer import OptimizerPlan


class Lion(torch.optim.Optimizer):
    """Lion with decoupled weight decay.

    Args:
        betas: share of the running mean in the step's direction, and decay of that mean.

    Source: arXiv:2302.06675, algorithm 2.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        betas: tuple[float, float] = (0.95, 0.98),
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            if moved:
                self._step(moved, group["lr"], group["betas"], group["weight_decay"])
        return loss

    def _step(
        self,
        moved: list[torch.Tensor],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        for p in moved:
            if not self.state[p]:
                self.state[p]["exp_avg"] = torch.zeros_like(p)
        gradients = [p.grad for p in moved if p.grad is not None]
        means = [self.state[p]["exp_avg"] for p in moved]
        directions = torch._foreach_lerp(means, gradients, 1 - betas[0])
        torch._foreach_sign_(directions)
        torch._foreach_mul_(moved, 1 - lr * weight_decay)
        torch._foreach_add_(moved, directions, alpha=-lr)
        torch._foreach_lerp_(means, gradients, 1 - betas[1])


@OPTIMIZERS.register("lion")
def lion(
    groups: list[dict[str, Any]], lr: float, plan: OptimizerPlan, **_: Any
) -> torch.optim.Optimizer:
    """Return Lion."""
    return Lion(groups, lr, betas=(plan.beta1, plan.beta2))
