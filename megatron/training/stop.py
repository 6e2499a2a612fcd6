"""When a run ends."""

from megatron.plan.training_plan import TrainingPlan
from megatron.training.state import TrainState


class Stop:
    """Gives the reason to end the run, or None to go on."""

    def __init__(self, plan: TrainingPlan, *, started_from: int):
        self._plan = plan
        self._started_from = started_from

    def __call__(self, state: TrainState) -> str | None:
        """Return why the run ends before its next step, if it does."""
        if state.iteration >= self._plan.train_iters:
            return f"training is done after {state.iteration} iterations"
        interval = self._plan.exit_interval
        if interval and state.iteration > self._started_from and state.iteration % interval == 0:
            return f"exiting program at iteration {state.iteration}"
        return None
