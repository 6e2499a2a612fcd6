"""Skip optimizer steps with NaN or infinite gradients, in every dtype."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from megatron.common.errors import TrainingError
from megatron.engine.deepspeed.patches.grad_norm import (
    drop_refused_gradients,
    grad_norm_of_step,
    wrap_step,
)


class SkipNonfinite:
    """Wrap the optimizer's step: only finite gradients reach the weights.

    DeepSpeed skips such steps itself in fp16 and in some layouts of other dtypes; this is the rest.
    The norm is that of the full network, so that all ranks decide alike.
    """

    def __init__(self, engine: Any, optimizer: Optimizer):
        self._engine = engine
        self._last_skipped = -1
        self.num_skipped = 0
        wrap_step(optimizer, self._step_if_finite)
        drop_refused_gradients(engine.optimizer)

    def reset(self) -> None:
        """Forget which step was skipped last: the steps after a checkpoint are repeated."""
        self._last_skipped = -1

    def _step_if_finite(self, step: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if is_finite(grad_norm_of_step(self._engine)):
            return step(*args, **options)
        # ZeRO steps once for each group of parameters.
        if self._engine.global_steps != self._last_skipped:
            self._last_skipped = self._engine.global_steps
            self.num_skipped += 1
        return None


def is_finite(norm: Any) -> bool:
    """Whether a gradient norm is finite; DeepSpeed marks a NaN by -1."""
    return norm is None or 0 <= float(norm) < math.inf


@contextmanager
def min_loss_scale_error() -> Iterator[None]:
    """Raise a TrainingError where DeepSpeed fails because the loss scale is at its minimum."""
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
