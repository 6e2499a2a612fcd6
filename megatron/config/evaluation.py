"""How often and on how much held-out data the model is evaluated."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation, as the user asked for it."""

    eval_interval: int = 1000
    """Iterations between evaluations on the validation set."""

    eval_iters: int = 100
    """Global batches per evaluation; 0 turns validation and test off."""
