"""How often and on how much held-out data the model is evaluated."""

from dataclasses import dataclass
from typing import Annotated

from megatron.config.parsing.flags import Spelling


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation, as the user asked for it."""

    eval_interval: int = 1000
    """Iterations between evaluations on the validation set; 0: only after the last."""

    eval_iters: int = 100
    """Global batches per evaluation; 0 turns validation and test off."""

    eval_only: Annotated[
        bool, Spelling("--eval-only", ("--skip-train", "--no-train"), with_truth=True)
    ] = False
    """Take no step and save nothing: evaluate what --load holds on the validation and test sets."""

    inference: bool = False
    """Like --eval-only, and build no optimizer, which takes most of the memory."""
