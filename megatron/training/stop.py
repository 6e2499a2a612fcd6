"""When a run ends."""

from collections.abc import Sequence

from megatron.plan.training_plan import TrainingPlan
from megatron.training.requests import Request, first_reason
from megatron.training.state import TrainState


class Stop:
    """Gives the reason to end the run, or None to go on.

    Args:
        requests: what may ask for the end from outside; all ranks follow when one is asked.
    """

    def __init__(self, plan: TrainingPlan, *, started_from: int, requests: Sequence[Request] = ()):
        self._plan = plan
        self._started_from = started_from
        self._requests = requests

    def __call__(self, state: TrainState) -> str | None:
        """Return why the run ends before its next step, if it does.

        Communication: one all-reduce of a few bytes over all ranks when there are requests.
        """
        if self.is_done(state):
            return f"training is done after {state.iteration} iterations"
        if reason := first_reason(self._requests):
            return reason
        interval = self._plan.exit_interval
        # A multiple may lie among iterations that are passed over.
        if interval and state.iteration // interval > self._started_from // interval:
            return f"exiting program at iteration {state.iteration}"
        return None

    def is_done(self, state: TrainState) -> bool:
        """Whether everything that was asked for is trained."""
        plan = self._plan
        return state.iteration >= plan.train_iters or 0 < plan.train_tokens <= state.tokens
