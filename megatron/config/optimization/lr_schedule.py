"""How the learning rate moves over training."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.config.parsing.flags import Spelling


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate, as the user asked for it."""

    lr: float
    """Peak learning rate, reached at the end of the warm-up."""

    min_lr: float = 0.0
    """The rate never falls below this after the warm-up."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the way from --lr to --min-lr; WSD stays at --lr until its last part."""

    lr_decay_iters: int | None = None
    """Iterations from the start until the floor is reached (default: the whole run)."""

    lr_decay_samples: int | None = None
    """Samples from the start until the floor is reached (default: the whole run)."""

    lr_decay_tokens: int | None = None
    """Tokens from the start until the floor is reached: the whole path is then one over tokens."""

    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the last part of WSD."""

    lr_wsd_decay_iters: int | None = None
    """Iterations that the last part of WSD takes."""

    lr_wsd_decay_samples: int | None = None
    """Samples that the last part of WSD takes."""

    lr_warmup_fraction: float | None = None
    """Part of the decay span that the rate takes to rise."""

    lr_warmup_iters: int = 0
    """Iterations that the rate takes to rise."""

    lr_warmup_samples: int = 0
    """Samples that the rate takes to rise."""

    lr_warmup_tokens: int = 0
    """Tokens that the rate takes to rise: the whole path is then one over tokens."""

    lr_warmup_init: float = 0.0
    """Learning rate at the start of the warm-up."""

    override_opt_param_scheduler: Annotated[
        bool, Spelling("--override-opt_param-scheduler", ("--override-lr-scheduler",))
    ] = False
    """Go on from a checkpoint with the learning rate of these flags, though its run had another."""

    use_checkpoint_opt_param_scheduler: Annotated[
        bool, Spelling("--use-checkpoint-opt_param-scheduler", ("--use-checkpoint-lr-scheduler",))
    ] = False
    """Go on from a checkpoint with the learning rate of its run, whatever these flags say."""
