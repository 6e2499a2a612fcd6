"""All that changes during training."""

from dataclasses import dataclass


@dataclass
class TrainState:
    """Where the run stands, and nothing else. Every checkpoint saves it."""

    iteration: int = 0  # optimizer steps tried, the skipped ones included
    samples: int = 0  # samples consumed, over all replicas
    tokens: int = 0  # tokens consumed, over all replicas
    valid_samples: int = 0  # validation samples consumed, over all replicas
    skipped: int = 0  # steps thrown away because 16-bit gradients overflowed
