"""How the learning rate moves over training."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate, as the user asked for it."""

    lr: float
    """Peak learning rate, reached at the end of the warm-up."""

    min_lr: float = 0.0
    """The rate never falls below this after the warm-up."""

    lr_decay_style: Literal["constant", "linear", "cosine"] = "linear"
    """Shape of the fall from --lr to --min-lr."""

    lr_decay_iters: int | None = None
    """Iterations from the start until the floor is reached; the whole run when not said."""

    lr_decay_samples: int | None = None
    """Samples from the start until the floor is reached; the whole run when not said."""

    lr_warmup_fraction: float | None = None
    """Part of the decay span that the rate takes to rise from 0."""

    lr_warmup_iters: int = 0
    """Iterations that the rate takes to rise from 0."""

    lr_warmup_samples: int = 0
    """Samples that the rate takes to rise from 0."""
