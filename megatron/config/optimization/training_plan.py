"""How long the run is, and what ends it earlier."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.optimization.batch_plan import BatchPlan
from megatron.config.optimization.curriculum_plan import CurriculumPlan
from megatron.config.optimization.lr_schedule import ScheduleConfig
from megatron.config.optimization.skip_plan import is_skipped, plan_skips, skip_problems
from megatron.config.optimization.training import TrainingConfig

_SIZE_TOLERANCE = 0.05
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMBT]?)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """How long the run is, and what ends it earlier."""

    train_iters: int  # the skipped ones included
    train_samples: int  # likewise
    train_tokens: int  # the run ends when so many are trained on; 0: no limit
    exit_interval: int  # 0: never
    exit_after_minutes: int  # 0: never
    exits_on_signal: bool
    kill_switch: str  # file that ends the run; "": none
    max_nan_steps: int  # in a row; 0: no limit
    replica_check_interval: int  # 0: never
    skips: tuple[tuple[int, int], ...]  # first and last iteration of what is passed over
    deterministic: bool
    seed: int


def plan_training(
    training: TrainingConfig, batch: BatchPlan, curriculum: CurriculumPlan, *, saves: bool
) -> TrainingPlan:
    """Return the run's length in steps and in samples, and what ends it earlier.

    Args:
        saves: whether the run takes steps and has somewhere to save them.
    """
    skips = plan_skips(training.skip_train_iteration_range)
    lengths = []
    if training.train_iters is not None:
        lengths.append((training.train_iters, training.train_iters * batch.global_batch_size))
    if training.train_samples is not None:
        lengths.append((batch.iterations_for(training.train_samples), training.train_samples))
    if training.train_tokens is not None:
        lengths.append(_length_of_tokens(training.train_tokens, batch, curriculum, skips))
    iterations, samples = min(lengths, default=(0, 0))
    return TrainingPlan(
        train_iters=iterations,
        train_samples=samples,
        train_tokens=training.train_tokens or 0,
        exit_interval=training.exit_interval or 0,
        exit_after_minutes=training.exit_duration_in_mins or 0,
        exits_on_signal=training.exit_signal_handler or saves,
        kill_switch=training.kill_switch_path or "",
        max_nan_steps=training.max_nan_steps if training.check_for_nan_in_loss_and_grad else 0,
        replica_check_interval=training.replica_check_interval or 0,
        skips=skips,
        deterministic=training.deterministic_mode,
        seed=training.seed,
    )


def _length_of_tokens(
    tokens: int, batch: BatchPlan, curriculum: CurriculumPlan, skips: tuple[tuple[int, int], ...]
) -> tuple[int, int]:
    """Return the iterations and samples after which `tokens` have been trained on."""
    steady_from = _steady_from(curriculum, skips)
    iteration, samples, done = 0, 0, 0
    while done < tokens and (iteration < steady_from or batch.is_ramping(samples)):
        iteration += 1
        size = batch.size_at(samples)
        samples += size
        if not is_skipped(iteration, skips):
            done += size * curriculum.length_at(iteration)
    per_step = batch.global_batch_size * curriculum.stop
    left = max(0, -(-(tokens - done) // per_step))
    return iteration + left, samples + left * batch.global_batch_size


def tokens_of(
    samples: float, batch: BatchPlan, curriculum: CurriculumPlan, skips: tuple[tuple[int, int], ...]
) -> int:
    """Return the tokens that the first steps of at least `samples` samples train on."""
    steady_from = _steady_from(curriculum, skips)
    iteration, consumed, done = 0, 0, 0
    while consumed < samples and (iteration < steady_from or batch.is_ramping(consumed)):
        iteration += 1
        size = batch.size_at(consumed)
        consumed += size
        if not is_skipped(iteration, skips):
            done += size * curriculum.length_at(iteration)
    left = max(0, math.ceil((samples - consumed) / batch.global_batch_size))
    return done + left * batch.global_batch_size * curriculum.stop


def _steady_from(curriculum: CurriculumPlan, skips: tuple[tuple[int, int], ...]) -> int:
    """Return the iteration after which all steps train on sequences of one length."""
    return max(curriculum.iterations, *(last for _, last in skips), 0)


def training_problems(training: TrainingConfig, schedule: ScheduleConfig) -> Iterator[str]:
    """Yield every contradiction in how long the run is and what that is counted in."""
    lengths = (training.train_iters, training.train_samples)
    if None not in lengths or (lengths == (None, None) and training.train_tokens is None):
        yield "give exactly one of --train-iters, --train-samples and --train-tokens"
        return
    for flag, length in (
        ("--train-iters", training.train_iters),
        ("--train-samples", training.train_samples),
        ("--train-tokens", training.train_tokens),
        ("--exit-interval", training.exit_interval),
        ("--exit-duration-in-mins", training.exit_duration_in_mins),
        ("--max-nan-steps", training.max_nan_steps),
        ("--replica-check-interval", training.replica_check_interval),
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
    yield from skip_problems(training.skip_train_iteration_range)
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


def size_problems(training: TrainingConfig, num_parameters: int) -> Iterator[str]:
    """Yield why the network is not of the size that --expect-params says."""
    text = training.expect_params
    if text is None:
        return
    match = _SIZE.fullmatch(text)
    if match is None:
        yield f"--expect-params {text}: write a number with K, M, B or T, such as 350M or 1.3B"
        return
    expected = float(match[1]) * _UNITS[match[2].upper()]
    if abs(num_parameters - expected) > _SIZE_TOLERANCE * expected:
        yield (
            f"--expect-params {text}, but the flags describe a network of {num_parameters:,} "
            f"parameters, which is not within {_SIZE_TOLERANCE:.0%}"
        )
