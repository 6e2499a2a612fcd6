"""What is computed again in the backward pass instead of being kept."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Recomputation, as the user asked for it."""

    checkpoint_activations: bool = False
    """Keep only the input of every transformer layer and compute the rest again in the backward
    pass: less memory for about a third more computation."""
