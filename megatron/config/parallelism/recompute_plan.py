"""Activation checkpointing (recomputation), resolved: a leaf without imports of flags."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RecomputePlan:
    """Activation checkpointing, resolved.

    With "full", `method` selects the layers: all of them in groups of `num_layers` ("uniform"), or
    the first `num_layers` of each virtual stage one by one ("block").
    """

    granularity: Literal["none", "selective", "full"]
    method: Literal["uniform", "block"]
    num_layers: int
    share: float  # part of the layers that is recomputed in full

    def groups(self, count: int) -> list[range]:
        """Return the groups of `count` consecutive layers of a stage that are recomputed together.

        >>> RecomputePlan(granularity="full", method="uniform", num_layers=2, share=1.0).groups(3)
        [range(0, 2), range(2, 3)]
        """
        if self.granularity != "full":
            return []
        if self.method == "block":
            return [range(i, i + 1) for i in range(min(self.num_layers, count))]
        step = self.num_layers
        return [range(i, min(i + step, count)) for i in range(0, count, step)]


NOTHING = RecomputePlan(granularity="none", method="uniform", num_layers=1, share=0.0)
