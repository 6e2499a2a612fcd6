"""The learning rate's path, in samples."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.schedule import ScheduleConfig
from megatron.plan.batch_plan import BatchPlan
from megatron.plan.training_plan import TrainingPlan


@dataclass(frozen=True, kw_only=True)
class SchedulePlan:
    """The learning rate as a function of training samples."""

    style: str
    peak: float
    floor: float
    warmup_samples: int
    decay_samples: int


def plan_schedule(
    schedule: ScheduleConfig, training: TrainingPlan, batch: BatchPlan
) -> SchedulePlan:
    """Return the learning rate's path; iterations count as full global batches."""
    iteration = batch.global_batch_size
    if schedule.lr_decay_samples is not None:
        decay = schedule.lr_decay_samples
    elif schedule.lr_decay_iters is not None:
        decay = schedule.lr_decay_iters * iteration
    else:
        decay = training.train_samples
    if schedule.lr_warmup_fraction is not None:
        warmup = int(schedule.lr_warmup_fraction * decay)
    else:
        warmup = schedule.lr_warmup_samples or schedule.lr_warmup_iters * iteration
    return SchedulePlan(
        style=schedule.lr_decay_style,
        peak=schedule.lr,
        floor=schedule.min_lr,
        warmup_samples=warmup,
        decay_samples=decay,
    )


def schedule_problems(schedule: ScheduleConfig, plan: SchedulePlan) -> Iterator[str]:
    """Yield every reason why the learning rate has no such path."""
    fraction = schedule.lr_warmup_fraction
    if schedule.lr < 0 or schedule.min_lr < 0:
        yield f"--lr {schedule.lr} and --min-lr {schedule.min_lr} must not be negative"
    if schedule.min_lr > schedule.lr:
        yield f"--min-lr {schedule.min_lr} is more than --lr {schedule.lr}"
    if fraction is not None and not 0 <= fraction <= 1:
        yield f"--lr-warmup-fraction {fraction} must be between 0 and 1"
    if fraction is not None and (schedule.lr_warmup_iters or schedule.lr_warmup_samples):
        yield "--lr-warmup-fraction and --lr-warmup-iters/samples say the same: give one of them"
    if plan.decay_samples < 1:
        yield f"the learning rate decays over {plan.decay_samples} samples; at least 1 is needed"
    elif plan.warmup_samples >= plan.decay_samples:
        yield (
            f"the warm-up ({plan.warmup_samples} samples) is not shorter than the decay "
            f"({plan.decay_samples} samples)"
        )
