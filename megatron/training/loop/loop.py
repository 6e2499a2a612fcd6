"""Training loop, with hooks before and after each step."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import ConfigError


class Engine(Protocol):
    """Interface of an engine that a training step needs."""

    @property
    def grad_norm(self) -> float | None:
        """Norm of the last gradient."""

    @property
    def loss_scale(self) -> float:
        """Loss scale of the last step."""

    @property
    def skipped_steps(self) -> int:
        """Steps thrown away so far."""

    def set_lr(self, lr: float) -> None:
        """Use this learning rate."""

    def set_embedding_lr(self, lr: float) -> None:
        """Use this learning rate for the token embedding and the output layer."""

    def set_weight_decay(self, weight_decay: float) -> None:
        """Use this weight decay."""

    def set_global_batch_size(self, samples: int) -> None:
        """Set the samples per step."""

    def set_seq_length(self, tokens: int) -> None:
        """Set the tokens per sample."""

    def train_batch(self, batches: Iterator[Any]) -> Any:
        """Take one step; return its loss."""


@dataclass(frozen=True)
class Schedule:
    """Schedules of a step: by the state or the samples before it, or by its number from 1 on."""

    lr: Callable[[TrainState], float]
    weight_decay: Callable[[int], float]  # of the samples
    batch_size: Callable[[int], int]  # of the samples
    seq_length: Callable[[int], int]  # of the number
    embedding_lr: Callable[[TrainState], float] | None = None  # where the embedding has its own


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of one step."""

    loss: float
    lr: float
    embedding_lr: float | None = None  # where the embedding and the output layer have their own
    batch_size: int  # samples, over all replicas
    seq_length: int  # tokens per sample
    seconds: float
    grad_norm: float | None
    loss_scale: float
    skipped: bool
    measures: Mapping[str, float] = field(default_factory=dict)

    def is_finite(self, *, seeks_scale: bool) -> bool:
        """Return whether loss and gradient norm are neither NaN nor infinite.

        Args:
            seeks_scale: whether fp16 skips steps to find a loss scale; the norm does not count then.
        """
        norm = self.grad_norm
        return math.isfinite(self.loss) and (seeks_scale or norm is None or math.isfinite(norm))


class Hook:
    """Hook around a training step; does nothing where it is not overridden."""

    def before_step(self, state: TrainState) -> None:
        """Act before the next step, or before the run finds that there is none."""

    def after_step(self, state: TrainState, step: StepResult) -> None:
        """Act on the step's result; `state` counts it already."""

    def for_saves(self, engine: Any) -> Any:
        """Return the engine that saves checkpoints: `engine`, or one around it."""
        return engine


def require_hooks(hooks: Sequence[Any], source: str) -> None:
    """Raise ConfigError if `hooks`, which `source` gave, are not a sequence of hooks."""
    if not isinstance(hooks, Sequence):
        raise ConfigError(f"{source} {hooks!r}: give a list of instances of Hook")
    for hook in hooks:
        if not isinstance(hook, Hook):
            raise ConfigError(f"{source} {hook!r} is no instance of Hook")


Meter = Callable[[TrainState], Mapping[str, float]]
"""Measures the model after a step, on all ranks in step; returns numbers by name."""


def train(
    engine: Engine,
    batches: Iterator[Any],
    *,
    schedule: Schedule,
    state: TrainState,
    hooks: Sequence[Hook],
    stop: Callable[[TrainState], str | None],
    meters: Sequence[Meter] = (),
) -> str:
    """Take optimizer steps until `stop` gives a reason; return the reason.

    `state` is updated in place, so a hook that saves it always saves where we are.
    """
    while True:
        for hook in hooks:
            hook.before_step(state)
        if (reason := stop(state)) is not None:
            return reason
        step = take_step(engine, batches, schedule, state)
        state.iteration += 1
        state.samples += step.batch_size
        state.tokens += step.batch_size * step.seq_length
        state.skipped += step.skipped
        measures = {name: value for meter in meters for name, value in meter(state).items()}
        step = replace(step, measures=measures)
        for hook in hooks:
            hook.after_step(state, step)


def take_step(
    engine: Engine, batches: Iterator[Any], schedule: Schedule, state: TrainState
) -> StepResult:
    """Take one optimizer step with the batch size, learning rate and weight decay of `schedule`."""
    started_at, skipped_before = time.perf_counter(), engine.skipped_steps
    batch_size, lr = schedule.batch_size(state.samples), schedule.lr(state)
    seq_length = schedule.seq_length(state.iteration + 1)
    engine.set_global_batch_size(batch_size)
    engine.set_seq_length(seq_length)
    engine.set_lr(lr)
    embedding_lr = schedule.embedding_lr(state) if schedule.embedding_lr else None
    if embedding_lr is not None:
        engine.set_embedding_lr(embedding_lr)
    engine.set_weight_decay(schedule.weight_decay(state.samples))
    loss = float(engine.train_batch(batches))
    return StepResult(
        loss=loss,
        lr=lr,
        embedding_lr=embedding_lr,
        batch_size=batch_size,
        seq_length=seq_length,
        seconds=time.perf_counter() - started_at,
        grad_norm=engine.grad_norm,
        loss_scale=engine.loss_scale,
        skipped=engine.skipped_steps > skipped_before,
    )
