"""NaN guard: warn of steps with a NaN or infinite loss or gradient; end the run after some."""

import logging
from collections.abc import Callable

from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import TrainingError
from megatron.training.loop.loop import Hook, StepResult

log = logging.getLogger(__name__)


class NanGuard(Hook):
    """Warn of steps with a NaN or infinite loss or gradient; end the run after some (--max-nan-steps).

    Args:
        most: number in a row that ends it.
        seeks_scale: see `StepResult.is_finite`.
        advice: names the checkpoint to resume from, for the error that ends the run.
    """

    def __init__(self, most: int, *, seeks_scale: bool, advice: Callable[[], str] = lambda: ""):
        self._most = most
        self._seeks_scale = seeks_scale
        self._advice = advice
        self._in_a_row = 0

    def after_step(self, state: TrainState, step: StepResult) -> None:
        """Count the step, or reset the count."""
        if step.is_finite(seeks_scale=self._seeks_scale):
            self._in_a_row = 0
            return
        self._in_a_row += 1
        event = f"iteration {state.iteration} (samples {state.samples - step.batch_size} to "
        event += f"{state.samples - 1}): loss {step.loss}, gradient norm {step.grad_norm}"
        if self._in_a_row < self._most:
            kept = "weights are as before" if step.skipped else "weights have changed"
            log.warning("%s; %s; %d in a row", event, kept, self._in_a_row)
            return
        raise TrainingError(
            f"{event}, the last of {self._in_a_row} consecutive steps with NaN or infinity: the run ends, "
            "and none of these steps was saved; lower --lr, skip these samples with "
            "--skip-train-iteration-range if others are fine, or raise --max-nan-steps"
            + self._advice()
        )
