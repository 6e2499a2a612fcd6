"""How long the run is."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.schedule import ScheduleConfig
from megatron.config.training import TrainingConfig
from megatron.plan.batch_plan import BatchPlan


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """How long the run is."""

    train_iters: int
    train_samples: int
    exit_interval: int  # 0: never
    seed: int


def plan_training(training: TrainingConfig, batch: BatchPlan) -> TrainingPlan:
    """Return the run's length in steps and in samples."""
    if training.train_samples is not None:
        iterations, samples = batch.iterations_for(training.train_samples), training.train_samples
    else:
        iterations = training.train_iters or 0
        samples = iterations * batch.global_batch_size
    return TrainingPlan(
        train_iters=iterations,
        train_samples=samples,
        exit_interval=training.exit_interval or 0,
        seed=training.seed,
    )


def training_problems(training: TrainingConfig, schedule: ScheduleConfig) -> Iterator[str]:
    """Yield every contradiction in how long the run is and what that is counted in."""
    if (training.train_iters is None) == (training.train_samples is None):
        yield "give exactly one of --train-iters and --train-samples"
        return
    for flag, length in (
        ("--train-iters", training.train_iters),
        ("--train-samples", training.train_samples),
        ("--exit-interval", training.exit_interval),
    ):
        if length is not None and length < 1:
            yield f"{flag} {length} must be at least 1"
    for flag, warmup in (
        ("--lr-warmup-iters", schedule.lr_warmup_iters),
        ("--lr-warmup-samples", schedule.lr_warmup_samples),
        ("--lr-warmup-tokens", schedule.lr_warmup_tokens),
    ):
        if warmup < 0:
            yield f"{flag} {warmup} must be at least 0"
    if training.seed < 1:
        yield f"--seed {training.seed} must be at least 1"
    by_iters = training.train_iters is not None
    run, wrong = ("--train-iters", "samples") if by_iters else ("--train-samples", "iters")
    decay, other_warmup, anneal = (
        (schedule.lr_decay_samples, schedule.lr_warmup_samples, schedule.lr_wsd_decay_samples)
        if by_iters
        else (schedule.lr_decay_iters, schedule.lr_warmup_iters, schedule.lr_wsd_decay_iters)
    )
    if decay is not None:
        yield f"--lr-decay-{wrong} does not go with {run}: count both in the same unit"
    if other_warmup:
        yield f"--lr-warmup-{wrong} does not go with {run}: count both in the same unit"
    if anneal is not None:
        yield f"--lr-wsd-decay-{wrong} does not go with {run}: count both in the same unit"
    if by_iters and training.rampup_batch_size is not None:
        yield "--rampup-batch-size is counted in samples: give --train-samples instead of --train-iters"
