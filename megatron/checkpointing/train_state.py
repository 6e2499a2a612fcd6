"""Training state: iteration, consumed samples and tokens, skipped steps; saved in every checkpoint."""

from dataclasses import dataclass


@dataclass
class TrainState:
    """Progress of a run. Every checkpoint saves it.

    All ranks hold the same values: the replica check compares them, so a time has no place here.
    """

    iteration: int = 0  # optimizer steps tried, the skipped ones included
    samples: int = 0  # samples consumed, over all replicas
    tokens: int = 0  # tokens consumed, over all replicas
    valid_samples: int = 0  # validation samples consumed, over all replicas
    skipped: int = 0  # steps skipped because fp16 gradients overflowed
    spikes: tuple[tuple[int, int], ...] = ()  # first and last skipped iteration of each loss spike

    def load(self, saved: "TrainState") -> None:
        """Take over the state in a manifest."""
        vars(self).update(vars(saved))
