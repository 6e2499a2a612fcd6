"""The learning-rate schedule (warm-up, decay, WSD): flags, resolution and checks."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from megatron.common.registry import SCHEDULES, OwnFlags
from megatron.config.optimization.training import (
    StepsPlan,
    TrainingConfig,
    has_one_length,
    tokens_of,
)
from megatron.config.parsing.declaration import range_problems, setting


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate: warm-up and decay."""

    lr: float = setting(plan="schedule.peak")
    """Peak learning rate, reached at the end of the warm-up."""

    min_lr: float = setting(0.0, plan="schedule.floor")
    """Minimum learning rate after the warm-up."""

    decoupled_lr: float | None = setting(None, above=0, plan="schedule.embedding_peak")
    """Peak learning rate of the token embedding and the output layer alone; warm-up and decay are those
    of --lr (default: --lr)."""

    decoupled_min_lr: float | None = setting(None, at_least=0, plan="schedule.embedding_floor")
    """With --decoupled-lr: its least learning rate after the warm-up (default: --min-lr)."""

    lr_decay_style: str = setting("linear", names=SCHEDULES, plan="schedule.style")
    """Shape of the decay from --lr to --min-lr; WSD stays at --lr until its last part."""

    lr_decay_iters: int | None = None
    """Iterations from the start until the floor is reached (default: the full run)."""

    lr_decay_samples: int | None = setting(None, plan="schedule.decay")
    """Samples from the start until the floor is reached (default: the full run)."""

    lr_decay_tokens: int | None = None
    """Tokens from the start until the floor is reached; the schedule is then a function of tokens."""

    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = setting(
        "exponential", plan="schedule.anneal_style"
    )
    """Shape of the last part of WSD."""

    lr_wsd_decay_iters: int | None = None
    """Iterations that the last part of WSD takes."""

    lr_wsd_decay_samples: int | None = None
    """Samples that the last part of WSD takes."""

    lr_warmup_fraction: float | None = setting(None, at_least=0, at_most=1, matters=False)
    """Warm-up as a fraction of the decay span."""

    lr_warmup_iters: int = setting(0, at_least=0)
    """Warm-up in iterations."""

    lr_warmup_samples: int = setting(0, at_least=0, plan="schedule.warmup")
    """Warm-up in samples."""

    lr_warmup_tokens: int = setting(0, at_least=0)
    """Warm-up in tokens; the schedule is then a function of tokens."""

    lr_warmup_init: float = setting(0.0, plan="schedule.init")
    """Learning rate at the start of the warm-up."""

    override_opt_param_scheduler: bool = setting(
        False, flag="--override-opt_param-scheduler", older=("--override-lr-scheduler",)
    )
    """Resume with the learning-rate schedule of these flags, although the checkpoint has
    another."""

    use_checkpoint_opt_param_scheduler: bool = setting(
        False, flag="--use-checkpoint-opt_param-scheduler", older=("--use-checkpoint-lr-scheduler",)
    )
    """Resume with the checkpoint's learning-rate schedule instead of these flags."""


@dataclass(frozen=True, kw_only=True)
class SchedulePlan:
    """The learning rate as a function of consumed samples or tokens, from the start of training."""

    unit: Literal["samples", "tokens"]
    style: str
    init: float  # the rate at the start of the warm-up
    peak: float
    floor: float
    warmup: float  # a fraction of the span need not be an integer
    decay: int  # where the floor is reached; the warm-up counts
    anneal: int  # the last part of WSD; 0 in other styles
    anneal_style: str
    # On resume the schedule must equal the checkpoint's, or the one of the flags or of the
    # checkpoint takes precedence.
    on_resume: Literal["equal", "flags", "checkpoint"]
    # Where tokens are counted and samples have different lengths: the warm-up rises over so many
    # samples, which end at `warmup` tokens. 0, also in checkpoints of before: it counts `unit`s.
    warmup_samples: float = 0
    own_flags: OwnFlags = ()  # of a plugin's style
    # Of the token embedding and the output layer; a peak of 0, also in older checkpoints: as for
    # all weights.
    embedding_peak: float = 0.0
    embedding_floor: float = 0.0

    @property
    def of_embeddings(self) -> "SchedulePlan | None":
        """The learning rate of the token embedding and the output layer, where it is another."""
        if not self.embedding_peak:
            return None
        return replace(
            self, peak=self.embedding_peak, floor=self.embedding_floor, embedding_peak=0.0
        )


def plan_schedule(schedule: ScheduleConfig, steps: StepsPlan, *, seq_length: int) -> SchedulePlan:
    """Return the learning-rate schedule; iterations count as full global batches.

    Args:
        seq_length: tokens of a sample. Where tokens are counted, samples count as so many.
    """
    training, batch, curriculum = steps.training, steps.batch, steps.curriculum
    iteration = batch.global_batch_size
    by_tokens = bool(schedule.lr_decay_tokens or schedule.lr_warmup_tokens)
    sample = seq_length if by_tokens else 1
    if schedule.lr_decay_tokens is not None:
        decay = schedule.lr_decay_tokens
    elif schedule.lr_decay_samples is not None:
        decay = schedule.lr_decay_samples * sample
    elif schedule.lr_decay_iters is not None:
        decay = schedule.lr_decay_iters * iteration * sample
    else:
        decay = training.train_samples * sample
    warmup: float
    warmup_samples = schedule.lr_warmup_samples or schedule.lr_warmup_iters * iteration
    rises_apart = by_tokens and bool(curriculum.schedule) and warmup_samples > 0
    if schedule.lr_warmup_fraction is not None:
        warmup = schedule.lr_warmup_fraction * decay
    elif rises_apart:
        warmup = tokens_of(warmup_samples, batch, curriculum, training.skips)
    else:
        warmup = schedule.lr_warmup_tokens or warmup_samples * sample
    if not _decay_flag(schedule):
        decay = max(decay, int(warmup) + sample)  # a run that ends in its warm-up
    override, keep = (
        schedule.override_opt_param_scheduler,
        schedule.use_checkpoint_opt_param_scheduler,
    )
    anneal = schedule.lr_wsd_decay_samples or (schedule.lr_wsd_decay_iters or 0) * iteration
    return SchedulePlan(
        unit="tokens" if by_tokens else "samples",
        style=schedule.lr_decay_style,
        init=schedule.lr_warmup_init,
        peak=schedule.lr,
        floor=schedule.min_lr,
        warmup=warmup,
        decay=decay,
        anneal=anneal * sample,
        anneal_style=schedule.lr_wsd_decay_style,
        on_resume="flags" if override else "checkpoint" if keep else "equal",
        warmup_samples=warmup_samples if rises_apart else 0,
        embedding_peak=schedule.decoupled_lr or 0.0,
        embedding_floor=_embedding_floor(schedule),
    )


def _embedding_floor(schedule: ScheduleConfig) -> float:
    if schedule.decoupled_lr is None:
        return 0.0
    floor = schedule.decoupled_min_lr
    return schedule.min_lr if floor is None else floor


def _embedding_problems(schedule: ScheduleConfig) -> Iterator[str]:
    """Yield problems of the learning rate of the embedding and the output layer."""
    peak, floor = schedule.decoupled_lr, _embedding_floor(schedule)
    yield from range_problems(schedule, "decoupled_lr", "decoupled_min_lr")
    if peak is None and schedule.decoupled_min_lr is not None:
        yield "--decoupled-min-lr is the least rate of --decoupled-lr: give that flag too"
    elif peak is not None and floor > peak:
        flag = "--min-lr" if schedule.decoupled_min_lr is None else "--decoupled-min-lr"
        yield f"{flag} {floor} is more than --decoupled-lr {peak}: give a --decoupled-min-lr below it"


def unit_problems(schedule: ScheduleConfig, training: TrainingConfig) -> Iterator[str]:
    """Yield every length of the schedule that is negative or in another unit than the run's."""
    if not has_one_length(training):
        return
    yield from range_problems(schedule)
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


def schedule_problems(
    schedule: ScheduleConfig, training: TrainingConfig, plan: SchedulePlan
) -> Iterator[str]:
    """Yield every problem of the learning rate's flags."""
    fraction = schedule.lr_warmup_fraction
    if schedule.lr < 0 or schedule.min_lr < 0:
        yield f"--lr {schedule.lr} and --min-lr {schedule.min_lr} must not be negative"
    elif schedule.min_lr > schedule.lr:
        yield f"--min-lr {schedule.min_lr} is more than --lr {schedule.lr}"
    if schedule.lr >= 0 and not 0 <= schedule.lr_warmup_init <= schedule.lr:
        yield f"--lr-warmup-init {schedule.lr_warmup_init} must be between 0 and --lr {schedule.lr}"
    wrong_fraction = [*range_problems(schedule, "lr_warmup_fraction")]
    yield from wrong_fraction
    yield from _embedding_problems(schedule)
    lengths = ("iters", "samples", "tokens")
    given = [unit for unit in lengths if getattr(schedule, f"lr_warmup_{unit}")]
    if fraction is not None and given:
        yield "--lr-warmup-fraction and --lr-warmup-iters/samples/tokens set the same: give one of them"
    if len(given) > 1:
        yield f"--lr-warmup-{given[0]} and --lr-warmup-{given[1]} set the same: give one of them"
    if plan.decay < 1:
        yield f"the learning rate decays over {plan.decay} {plan.unit}; at least 1 is needed"
    elif plan.warmup >= plan.decay and not wrong_fraction:
        yield f"{_warmup(schedule, plan)} is not shorter than {_decay(schedule, training, plan)}"
    yield from _wsd_problems(schedule, training, plan)
    if schedule.override_opt_param_scheduler and schedule.use_checkpoint_opt_param_scheduler:
        yield (
            "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each "
            "other: the learning rate is that of the flags, or that of the checkpoint"
        )


def warmup_notices(
    schedule: ScheduleConfig, training: TrainingConfig, plan: SchedulePlan, length: int
) -> Iterator[str]:
    """Yield a warning of a run that ends in its warm-up.

    Args:
        length: of the run, in the plan's unit.
    """
    if plan.warmup >= length and not _decay_flag(schedule):
        run = _flag_and_length(training, ["train_samples", "train_iters"], length, plan.unit)
        yield (
            f"warning: {_warmup(schedule, plan)} is not shorter than {run or 'the run'}: the learning "
            f"rate rises all the time and does not reach --lr {schedule.lr}"
        )


def _decay_flag(schedule: ScheduleConfig) -> str:
    """Return the flag that sets where the schedule ends; "" if the length of the run does."""
    names = (f"lr_decay_{unit}" for unit in ("tokens", "samples", "iters"))
    return next((name for name in names if getattr(schedule, name) is not None), "")


def _warmup(schedule: ScheduleConfig, plan: SchedulePlan) -> str:
    flags = [f"lr_warmup_{unit}" for unit in ("fraction", "tokens", "samples", "iters")]
    return _flag_and_length(schedule, flags, plan.warmup, plan.unit)


def _decay(schedule: ScheduleConfig, training: TrainingConfig, plan: SchedulePlan) -> str:
    flags = [f"lr_decay_{unit}" for unit in ("tokens", "samples", "iters")]
    if found := _flag_and_length(schedule, flags, plan.decay, plan.unit):
        return found
    return _flag_and_length(training, ["train_samples", "train_iters"], plan.decay, plan.unit)


def _flag_and_length(config: object, names: list[str], length: float, unit: str) -> str:
    """Format the first of these flags that is given, with its length in `unit`; "" for none."""
    for name in names:
        if value := getattr(config, name):
            flag = f"--{name.replace('_', '-')} {value}"
            return flag if name.endswith(unit) else f"{flag} ({length:.15g} {unit})"
    return ""


def _wsd_problems(
    schedule: ScheduleConfig, training: TrainingConfig, plan: SchedulePlan
) -> Iterator[str]:
    given = schedule.lr_wsd_decay_iters is not None or schedule.lr_wsd_decay_samples is not None
    if schedule.lr_decay_style != "WSD":
        if given:
            yield "--lr-wsd-decay-iters and --lr-wsd-decay-samples need --lr-decay-style WSD"
    elif plan.anneal < 1:
        yield (
            "--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples: how long its "
            "last part is"
        )
    elif plan.anneal > plan.decay - plan.warmup:
        last = _flag_and_length(
            schedule, ["lr_wsd_decay_samples", "lr_wsd_decay_iters"], plan.anneal, plan.unit
        )
        after = f" after {_warmup(schedule, plan)}" if plan.warmup else ""
        yield f"{last} does not fit into {_decay(schedule, training, plan)}{after}"
