"""A trace of some iterations by PyTorch's profiler, to be opened with Perfetto or TensorBoard."""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import ConfigError, reason
from megatron.config.run.logging import ProfilePlan
from megatron.training.loop.loop import Hook, StepResult

log = logging.getLogger(__name__)


class Profile(Hook):
    """Records the iterations from `plan.start` to before `plan.stop` on this rank."""

    def __init__(self, plan: ProfilePlan, *, rank: int):
        self._plan = plan
        self._rank = rank
        self._recording: profile | None = None
        self._first = 0

    def before_step(self, state: TrainState) -> None:
        """Begin when the next iteration is one to record."""
        if self._recording is None and self._plan.start <= state.iteration + 1 < self._plan.stop:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._recording = profile(activities=activities, record_shapes=True)
            self._recording.start()
            self._first = state.iteration + 1

    def after_step(self, state: TrainState, step: StepResult) -> None:
        """Stop after the last iteration to record."""
        if state.iteration + 1 >= self._plan.stop:
            self._write(state)

    def close(self, state: TrainState) -> None:
        """Write the recorded profile, and warn if there is none."""
        self._write(state)
        if not self._first:
            log.warning(
                "--profile: this start took none of the iterations %d to %d, so there is no trace; "
                "--profile-step-start and --profile-step-end say which are recorded",
                *(self._plan.start, self._plan.stop - 1),
            )

    def _write(self, state: TrainState) -> None:
        if self._recording is None:
            return
        self._recording.stop()
        name = f"trace_rank{self._rank}_iterations{self._first}-{state.iteration}.json"
        file = Path(self._plan.directory) / name
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._recording.export_chrome_trace(str(file))
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"--profile-dir {self._plan.directory}: {reason(error, self._plan.directory)}"
            ) from error
        self._recording = None
        log.info("profile of iterations %d to %d: %s", self._first, state.iteration, file)
