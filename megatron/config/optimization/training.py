"""Length of the run, and what ends it earlier: flags, resolution and checks."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config.optimization.batch_size import (
    NO_PROGRESS,
    BatchPlan,
    Progress,
    last_size,
    parse_quantity,
    plan_batch,
    size_schedule_of,
)
from megatron.config.optimization.curriculum import CurriculumPlan, plan_curriculum
from megatron.config.parsing.declaration import range_problems, resolve, setting
from megatron.config.parsing.json_tree import value_at


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Batch size, length of the run, and what ends it earlier."""

    micro_batch_size: int
    """Micro-batch size: samples per data-parallel rank and forward pass."""

    global_batch_size: int | None = None
    """Samples per optimizer step (default: one micro-batch per replica)."""

    gradient_accumulation_steps: int | None = setting(None, at_least=1, older=("--gas",))
    """Micro-batches of each replica per optimizer step, in place of --global-batch-size."""

    rampup_batch_size: list[int] | None = None
    """Batch size ramp-up, three numbers of samples: first global batch size, increment, and the length
    of the ramp to --global-batch-size."""

    step_batch_size_schedule: list[str] | None = None
    """Global batch size by tokens, in place of --global-batch-size: entries TOKENS:SIZE, such as 0:768
    250B:1536, each the tokens (with K, M, B or T) after which a step takes SIZE samples."""

    train_iters: int | None = setting(None, at_least=1)
    """Length of the run in optimizer steps; give this, --train-samples or --train-tokens."""

    train_samples: int | None = setting(None, at_least=1)
    """Length of the run in samples; give this, --train-iters or --train-tokens."""

    train_tokens: int | None = setting(None, at_least=1)
    """Length of the run in tokens trained on; together with --train-iters or --train-samples, a
    limit that may end the run earlier."""

    seed: int = setting(1234, at_least=1)
    """Seed of initial weights, dropout and data order; greater than 0."""

    exit_interval: int | None = setting(None, at_least=1)
    """Save and exit at the next iteration that is a multiple of this."""

    exit_duration_in_mins: int | None = setting(
        None, at_least=1, plan="training.exit_after_minutes"
    )
    """Save and exit after the first iteration that ends so many minutes after the start."""

    exit_signal_handler: bool = setting(False, plan="training.exits_on_signal")
    """Exit after the current iteration when any process gets SIGTERM, SIGINT (Ctrl-C), SIGUSR1 or SIGHUP (its terminal is closed). Runs with --save do that without this flag, after a last checkpoint."""

    kill_switch_path: str | None = setting(
        None, older=("--kill-switch-file",), plan="training.kill_switch"
    )
    """Save and exit after the current iteration when this file exists; do not start while it does."""

    hang_timeout: float | None = setting(None, at_least=0, matters=False, remedy=" seconds")
    """Watchdog: seconds without a step, an evaluated batch or a save after which the run ends as
    hung, with the stacks of all processes in --save; each part of the start, the first step and a
    save may take 5 times as long. 0: no limit (default: 1200 on several GPUs with --save, where
    NCCL waits for lost ranks; otherwise 0)."""

    max_restarts: int = setting(0, at_least=0, matters=False)
    """Start this command under torch.distributed.run, which restarts it at most this many times
    after failures; each restart resumes from --load. Under that launcher, use its option of the
    same name instead."""

    skip_train_iteration_range: list[str] | None = setting(None, plan="training.skips")
    """Iterations to skip, as A-B with both ends: their samples are skipped, and neither weights nor
    optimizer change."""

    check_for_nan_in_loss_and_grad: bool = True
    """Do not end the run after --max-nan-steps consecutive steps with a NaN or infinite loss or gradient.
    Such a step never changes the weights, with or without this flag; steps that fp16 skips to find
    its loss scale do not count."""

    max_nan_steps: int = setting(5, at_least=1)
    """Steps in a row with a NaN or infinite loss or gradient that end the run."""

    replica_check_interval: int | None = setting(
        None, at_least=1, older=("--check-weight-hash-across-dp-replicas-interval",)
    )
    """Iterations between comparisons of values that ranks must have in common: weights, RNG states
    and counters (default: never). A difference ends the run."""

    deterministic_mode: bool = setting(False, plan="training.deterministic")
    """Use deterministic algorithms, bit for bit reproducible, and fail where there is none."""

    expect_params: str | None = None
    """Number of parameters that the network must have within 5 percent, such as 350M or 1.3B."""

    config: str | None = None
    """A YAML file of flags (without the dashes); command-line flags take precedence."""

    preset: str | None = None
    """Flags of a known network, such as llama-3-8b: a file of examples/models/ without .yaml.
    Flags of --config and of the command line take precedence."""


_SIZE_TOLERANCE = 0.05


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Length of the run, resolved, and what ends it earlier."""

    train_iters: int  # the skipped ones included
    train_samples: int  # likewise
    train_tokens: int  # the run ends when so many are trained on; 0: no limit
    exit_interval: int  # 0: never
    exit_after_minutes: int  # 0: never
    exits_on_signal: bool
    kill_switch: str  # file that ends the run; "": none
    max_nan_steps: int  # in a row; 0: no limit
    replica_check_interval: int  # 0: never
    skips: tuple[tuple[int, int], ...]  # first and last iteration of each skipped range
    deterministic: bool
    seed: int


def plan_training(
    training: TrainingConfig,
    batch: BatchPlan,
    curriculum: CurriculumPlan,
    *,
    saves: bool,
    done: Progress = NO_PROGRESS,
) -> TrainingPlan:
    """Return the run's length in steps and in samples, and what ends it earlier.

    Args:
        saves: whether the run takes steps and has somewhere to save them.
        done: of the checkpoint that it resumes from, whose steps may have had other sizes.
    """
    skips = plan_skips(training.skip_train_iteration_range)
    lengths = []
    if training.train_iters is not None:
        size, iters = batch.global_batch_size, training.train_iters
        left = max(0, iters - done.iterations) * size
        lengths.append((iters, max(iters * size, done.samples + left)))
    if training.train_samples is not None:
        lengths.append((batch.iterations_for(training.train_samples, done), training.train_samples))
    if training.train_tokens is not None:
        lengths.append(_length_of_tokens(training.train_tokens, batch, curriculum, skips, done))
    iterations, samples = min(lengths, default=(0, 0))
    return resolve(
        TrainingPlan,
        "training",
        training,
        train_iters=iterations,
        train_samples=samples,
        exits_on_signal=training.exit_signal_handler or saves,
        max_nan_steps=training.max_nan_steps if training.check_for_nan_in_loss_and_grad else 0,
        skips=skips,
    )


def _length_of_tokens(
    tokens: int,
    batch: BatchPlan,
    curriculum: CurriculumPlan,
    skips: tuple[tuple[int, int], ...],
    progress: Progress,
) -> tuple[int, int]:
    """Return the iterations and samples after which `tokens` have been trained on."""
    steady_from = _steady_from(curriculum, skips)
    iteration, samples, done = progress
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


def has_one_length(training: TrainingConfig) -> bool:
    """Whether the length of the run is given, and given once."""
    lengths = (training.train_iters, training.train_samples)
    return None in lengths and (lengths != (None, None) or training.train_tokens is not None)


def training_problems(training: TrainingConfig) -> Iterator[str]:
    """Yield every contradiction in how long the run is and what that is counted in."""
    if not has_one_length(training):
        yield "give exactly one of --train-iters, --train-samples and --train-tokens"
        return
    yield from range_problems(training)
    yield from skip_problems(training.skip_train_iteration_range)
    if training.train_iters is None:
        return
    schedules = {
        "--rampup-batch-size is counted in samples": training.rampup_batch_size,
        "--step-batch-size-schedule is counted in tokens": training.step_batch_size_schedule,
    }
    for what, schedule in schedules.items():
        if schedule is not None:
            yield f"{what}: give --train-samples or --train-tokens instead of --train-iters"


def size_problems(training: TrainingConfig, num_parameters: int) -> Iterator[str]:
    """Yield why the network does not have the size of --expect-params."""
    text = training.expect_params
    if text is None:
        return
    expected = parse_quantity(text)
    if expected is None:
        yield f"--expect-params {text}: write a number with K, M, B or T, such as 350M or 1.3B"
        return
    if abs(num_parameters - expected) > _SIZE_TOLERANCE * expected:
        yield (
            f"--expect-params {text}, but the flags describe a network of {num_parameters:,} "
            f"parameters, which is not within {_SIZE_TOLERANCE:.0%}"
        )


_RANGE = re.compile(r"(\d+(?:_\d+)*)-(\d+(?:_\d+)*)")


def plan_skips(texts: Sequence[str] | None) -> tuple[tuple[int, int], ...]:
    """Return first and last iteration of each range, in order; overlapping ranges are merged."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(filter(None, map(_bounds, texts or ()))):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def is_skipped(iteration: int, skips: Sequence[tuple[int, int]]) -> bool:
    """Whether the step that is number `iteration`, from 1 on, is skipped."""
    return any(first <= iteration <= last for first, last in skips)


def skip_problems(texts: Sequence[str] | None) -> Iterator[str]:
    """Yield every range that is malformed."""
    for text in texts or ():
        bounds = _bounds(text)
        if bounds is None or not 1 <= bounds[0] <= bounds[1]:
            yield (
                f"--skip-train-iteration-range {text}: write FIRST-LAST, two iterations from 1 on, "
                "the second not before the first"
            )


def _bounds(text: str) -> tuple[int, int] | None:
    match = _RANGE.fullmatch(text)
    return (int(match[1]), int(match[2])) if match else None


@dataclass(frozen=True, kw_only=True)
class StepsPlan:
    """Steps of a run: batches, sequence lengths, number."""

    batch: BatchPlan
    curriculum: CurriculumPlan
    training: TrainingPlan


def plan_steps(
    training: TrainingConfig,
    user: Mapping[str, Any],
    *,
    data: int,
    seq_length: int,
    saves: bool,
    done: Progress = NO_PROGRESS,
) -> StepsPlan:
    """Return the steps of a run on `data` replicas.

    Args:
        user: DeepSpeed's JSON.
        saves: whether the run takes steps and has somewhere to save them.
        done: of the checkpoint that it resumes from.
    """
    batch = plan_batch(
        training.micro_batch_size,
        training.rampup_batch_size,
        global_batch_size=samples_of_step(training, user, data=data),
        data_parallel_size=data,
        size_schedule=size_schedule_of(training.step_batch_size_schedule, seq_length),
    )
    curriculum = plan_curriculum(user, seq_length)
    return StepsPlan(
        batch=batch,
        curriculum=curriculum,
        training=plan_training(training, batch, curriculum, saves=saves, done=done),
    )


def samples_of_step(training: TrainingConfig, user: Mapping[str, Any], *, data: int) -> int:
    """Return the global batch size on `data` replicas, at the end of a ramp or schedule."""
    micro_batches = data * (training.gradient_accumulation_steps or 1)
    return global_batch_size_of(training, user) or training.micro_batch_size * micro_batches


def global_batch_size_of(training: TrainingConfig, user: Mapping[str, Any]) -> int | None:
    """Return the samples of a step by flags or by DeepSpeed's JSON, None by neither."""
    if training.global_batch_size is not None:
        return training.global_batch_size
    by_schedule = last_size(training.step_batch_size_schedule)
    return value_at(user, "train_batch_size") if by_schedule is None else by_schedule
