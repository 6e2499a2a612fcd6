"""When a run ends."""

from collections.abc import Callable

from megatron.common.errors import ExitCode
from megatron.config.optimization.training import TrainingPlan
from megatron.training.guards.stop_requests import Requests
from megatron.training.loop.state import TrainState


class Stop:
    """Gives the reason to end the run, or None to go on.

    Args:
        requests: what may be asked from outside; all ranks follow when one is asked.
        save: what a request to save calls; returns whether the state is saved.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        *,
        started_from: int,
        requests: Requests | None = None,
        save: Callable[[TrainState], bool] | None = None,
    ):
        self._plan = plan
        self._started_from = started_from
        self._requests = requests or Requests()
        self._save = save
        self.exit_code = ExitCode.FINISHED

    def __call__(self, state: TrainState) -> str | None:
        """Return why the run ends before its next step, if it does.

        Communication: one all-reduce of a few bytes over all ranks when there are requests.
        """
        if self.is_done(state):
            return f"training is done after {state.iteration} iterations"
        wish, saves = self._requests.agree()
        # Before the first step there is nothing to save, and without a finite loss nothing worth
        # it; the file waits.
        if saves and self._save and self._requests.save and state.iteration and self._save(state):
            self._requests.save.done()
        if wish:
            self.exit_code = wish.exit_code
            return wish.reason()
        interval = self._plan.exit_interval
        # A multiple may lie among iterations that are passed over.
        if interval and state.iteration // interval > self._started_from // interval:
            return f"exiting program at iteration {state.iteration}"
        return None

    def is_done(self, state: TrainState) -> bool:
        """Whether everything that was asked for is trained."""
        plan = self._plan
        return state.iteration >= plan.train_iters or 0 < plan.train_tokens <= state.tokens
