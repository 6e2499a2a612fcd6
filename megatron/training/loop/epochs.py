"""What a run does after each epoch of its data, where these have epochs."""

from megatron.checkpointing.train_state import TrainState
from megatron.training.loop.loop import Hook


class Progress(Hook):
    """Hook that shows how far an epoch is."""

    def close(self) -> None:
        """Show nothing any more."""


class EpochHook(Hook):
    """Hook that acts at the end of epochs, after their save; see `Objective.epochs`. For all ranks."""

    steps: int
    """Optimizer steps of an epoch."""

    progress: Progress | None = None
    """Rank 0's, None elsewhere."""

    def catch_up(self, state: TrainState) -> None:
        """Act on the epoch that was just saved when the run was killed."""

    def predict(self, state: TrainState) -> None:
        """Evaluate, in a run that does nothing else."""
