"""What surrounds the training steps, decided: evaluation, checkpoints, logs."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.config import Config


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """When and how long to evaluate."""

    interval: int
    iters: int  # 0: never


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """What is saved and loaded; an empty path means not at all."""

    save: str
    interval: int
    load: str


@dataclass(frozen=True, kw_only=True)
class LoggingPlan:
    """What is told; an empty path means no TensorBoard."""

    interval: int
    tensorboard_dir: str
    tensorboard_interval: int
    tensorboard_queue_size: int
    timers: bool
    batch_size: bool
    validation_ppl: bool
    learning_rate: bool
    loss_scale: bool


def plan_evaluation(config: Config) -> EvaluationPlan:
    """Return when and how long to evaluate."""
    return EvaluationPlan(
        interval=config.evaluation.eval_interval, iters=config.evaluation.eval_iters
    )


def plan_checkpoint(checkpoint: CheckpointConfig) -> CheckpointPlan:
    """Return what is saved and loaded."""
    return CheckpointPlan(
        save=checkpoint.save or "",
        interval=checkpoint.save_interval or 0,
        load=checkpoint.load or "",
    )


def plan_logging(config: Config) -> LoggingPlan:
    """Return what is told."""
    logging = config.logging
    return LoggingPlan(
        interval=logging.log_interval,
        tensorboard_dir=logging.tensorboard_dir or "",
        tensorboard_interval=logging.tensorboard_log_interval,
        tensorboard_queue_size=logging.tensorboard_queue_size,
        timers=logging.log_timers_to_tensorboard,
        batch_size=logging.log_batch_size_to_tensorboard,
        validation_ppl=logging.log_validation_ppl_to_tensorboard,
        learning_rate=logging.log_learning_rate_to_tensorboard,
        loss_scale=logging.log_loss_scale_to_tensorboard,
    )


def run_problems(config: Config) -> Iterator[str]:
    """Yield every reason why the run cannot be surrounded as asked."""
    for flag, value, least in (
        ("--log-interval", config.logging.log_interval, 1),
        ("--tensorboard-log-interval", config.logging.tensorboard_log_interval, 1),
        ("--eval-interval", config.evaluation.eval_interval, 1),
        ("--eval-iters", config.evaluation.eval_iters, 0),
        ("--save-interval", config.checkpoint.save_interval, 1),
    ):
        if value is not None and value < least:
            yield f"{flag} {value} must be at least {least}"
    if config.checkpoint.save and not config.checkpoint.save_interval:
        yield "--save needs --save-interval: how many iterations apart"
    if config.checkpoint.save_interval and not config.checkpoint.save:
        yield "--save-interval needs --save: the directory"
