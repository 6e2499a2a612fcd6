"""Steps whose gradient is no number do not reach the weights, in any number format."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from megatron.common.errors import TrainingError


class FiniteSteps:
    """Stands before the optimizer's own step and lets finite gradients pass.

    DeepSpeed throws such steps away in fp16 and in some layouts of other formats; this is the rest.
    The norm is that of the whole network, so that all ranks decide alike.
    """

    def __init__(self, engine: Any, optimizer: Optimizer):
        self._engine = engine
        self._step = optimizer.step
        self._last_refused = -1
        self.num_refused = 0
        optimizer.step = self._step_if_finite  # type: ignore[method-assign]

    def begin_anew(self) -> None:
        """Forget which step was refused last: the steps behind a checkpoint come again."""
        self._last_refused = -1

    def _step_if_finite(self, *args: Any, **options: Any) -> Any:
        holder = self._engine.optimizer
        if not hasattr(holder, "_global_grad_norm"):
            holder = self._engine
        if is_finite(holder._global_grad_norm):
            return self._step(*args, **options)
        # ZeRO comes once for each group of parameters.
        if self._engine.global_steps != self._last_refused:
            self._last_refused = self._engine.global_steps
            self.num_refused += 1
        return None


def forget_refused_gradients(optimizer: Any) -> None:
    """Let ZeRO stages 1 and 2 with CPU offload drop the gradients of a step that they refuse.

    DeepSpeed keeps them in its buffers and adds those of the next step, so that a NaN stays and
    every further step is refused.
    """
    if not hasattr(optimizer, "_release_preflattened_grad_buffers"):
        return
    reset = optimizer.reset_cpu_buffers

    def reset_all() -> None:
        reset()
        for group in optimizer.averaged_gradients:
            optimizer.averaged_gradients[group] = None

    optimizer.reset_cpu_buffers = reset_all


def is_finite(norm: Any) -> bool:
    """Whether `norm` is one; DeepSpeed says -1 for a norm that is no number."""
    return norm is None or 0 <= float(norm) < math.inf


@contextmanager
def least_scale_told() -> Iterator[None]:
    """Raise a TrainingError where DeepSpeed gives up because the loss scale cannot fall further."""
    try:
        yield
    except Exception as error:
        if "loss scale already at minimum" not in str(error):
            raise
        raise TrainingError(
            "fp16 gradients overflow even at the least loss scale (--min-loss-scale): the weights "
            "are as before the step, and checkpoints as they were; lower --lr, train with --bf16, "
            "or allow a smaller --min-loss-scale"
        ) from error
