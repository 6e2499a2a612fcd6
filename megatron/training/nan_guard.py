"""The end of a run whose loss or gradient is no number any more."""

import logging
import math

from megatron.errors import TrainingError
from megatron.training.loop import Hook, StepResult
from megatron.training.state import TrainState

log = logging.getLogger(__name__)


class NanGuard(Hook):
    """Tells of steps without a finite loss and gradient; ends the run after some. For all ranks.

    Args:
        most: how many in a row end it.
        seeks_scale: whether steps are thrown away to find a loss scale, which says nothing.
    """

    def __init__(self, most: int, *, seeks_scale: bool):
        self._most = most
        self._seeks_scale = seeks_scale
        self._in_a_row = 0

    def after_step(self, state: TrainState, step: StepResult) -> None:
        """Count the step, or begin anew."""
        norm = step.grad_norm
        is_loss_finite = math.isfinite(step.loss)
        is_norm_finite = self._seeks_scale or norm is None or math.isfinite(norm)
        if is_loss_finite and is_norm_finite:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        told = f"iteration {state.iteration} (samples {state.samples - step.batch_size} to "
        told += f"{state.samples - 1}): loss {step.loss}, gradient norm {norm}"
        if self._in_a_row < self._most:
            kept = "weights are as before" if step.skipped else "weights have changed"
            log.warning("%s; %s; %d in a row", told, kept, self._in_a_row)
            return
        raise TrainingError(
            f"{told}, the last of {self._in_a_row} in a row without a finite number: the run ends, "
            "and its checkpoints are as they were; pass over these samples with "
            "--skip-train-iteration-range, lower --lr, or raise --max-nan-steps"
        )
