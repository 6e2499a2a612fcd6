"""All that changes during training."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class TrainState:
    """Where the run stands, and nothing else. Every checkpoint saves it."""

    iteration: int = 0  # optimizer steps tried, the skipped ones included
    samples: int = 0  # samples consumed, over all replicas
    tokens: int = 0  # tokens consumed, over all replicas
    valid_samples: int = 0  # validation samples consumed, over all replicas
    skipped: int = 0  # steps thrown away because 16-bit gradients overflowed
    spikes: tuple[tuple[int, int], ...] = ()  # first and last iteration passed over, of each

    def take(self, saved: Mapping[str, Any]) -> None:
        """Become the state that a manifest holds; what it does not know stays as it is."""
        spikes = tuple((first, last) for first, last in saved.get("spikes", self.spikes))
        vars(self).update({**saved, "spikes": spikes})
