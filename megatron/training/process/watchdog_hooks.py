"""What the watchdog is told of the loop."""

from megatron.training.loop.loop import Hook, StepResult
from megatron.training.loop.state import TrainState
from megatron.training.process.watchdog import Watchdog


class Progress(Hook):
    """Tells it of each step."""

    def __init__(self, watchdog: Watchdog):
        self._watchdog = watchdog

    def before_step(self, state: TrainState) -> None:
        """Say which step begins."""
        self._watchdog.begins_step(state.iteration + 1)

    def after_step(self, state: TrainState, step: StepResult) -> None:
        """Say that it is done."""
        self._watchdog.moves()


class Named(Hook):
    """Another hook, while which the watchdog knows what is done.

    Args:
        stage: what it is called.
        longer: whether it may take longer than a step.
    """

    def __init__(self, hook: Hook, watchdog: Watchdog, stage: str, *, longer: bool = False):
        self._hook, self._watchdog, self._stage, self._longer = hook, watchdog, stage, longer

    def before_step(self, state: TrainState) -> None:
        """Act as the hook does."""
        self._hook.before_step(state)

    def after_step(self, state: TrainState, step: StepResult) -> None:
        """Act as the hook does, and say so."""
        with self._watchdog.during(self._stage, longer=self._longer):
            self._hook.after_step(state, step)
