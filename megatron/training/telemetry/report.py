"""The log line, and the journal's record that it is made from."""

import logging
import math
import re
import resource
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from typing import Any

import torch

from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import ConfigError
from megatron.config.data.objective import LM_LOSS, SOP_LOSS, UNMASKED
from megatron.config.network.prediction import MTP_LOSS
from megatron.config.parallelism.recompute_plan import NOTHING
from megatron.config.plan.plan import Plan
from megatron.planner.devices import known_device
from megatron.training.loop.journal import Journal
from megatron.training.loop.loop import Hook, Meter, StepResult
from megatron.training.telemetry.forecast import forecast_line
from megatron.training.telemetry.memory import ALLOCATED, AVAILABLE, RESERVED, RESIDENT
from megatron.training.telemetry.meters import (
    BUSIEST,
    CO2,
    DROPPED,
    ENERGY,
    LOAD_ENTROPY,
    MOE_LOSS,
    NUM_ZEROS,
    PARAMS_NORM,
    SEQ_LENGTH,
    TIME,
    times_in,
)
from megatron.training.telemetry.slow_ranks import SLOWEST, SLOWNESS

log = logging.getLogger(__name__)

_AFTER_LOSS = {
    **dict.fromkeys((SOP_LOSS, MTP_LOSS, MOE_LOSS), ".6E"),
    **{BUSIEST: ".2f", LOAD_ENTROPY: ".3f", DROPPED: ".2%", UNMASKED: ".2%"},
}
_BEFORE_COUNTS = {NUM_ZEROS: ".1f", PARAMS_NORM: ".3f", SEQ_LENGTH: "5d"}
MFU, HFU = "MFU", "HFU"
_AFTER_SPEED = {
    **{MFU: ".1%", HFU: ".1%", SLOWEST: "5d", SLOWNESS: ".2f", ENERGY: ".6f", CO2: ".6f"},
    **dict.fromkeys((ALLOCATED, RESERVED, RESIDENT, AVAILABLE), ".2f"),
}
"""Formats of what meters add to the line, and where."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Metrics since the last log line. Loss and time are means over its steps."""

    iteration: int
    train_iters: int
    consumed_samples: int
    consumed_tokens: int
    iteration_ms: float
    learning_rate: float
    decoupled_learning_rate: float | None = None  # of embedding and output layer, if they have one
    global_batch_size: int
    lm_loss: float
    loss_scale: float
    grad_norm: float | None
    measures: Mapping[str, float]
    skipped_iterations: int
    nan_iterations: int
    samples_per_second: float
    tflops: float  # per rank
    eta_s: float  # at the pace of this run so far, evaluations and checkpoints included

    def line(self, *, with_loss_scale: bool) -> str:
        """Return the log line. Tools parse it: names, order and formats are BigScience's."""
        decoupled = self.decoupled_learning_rate
        fields = [
            f"iteration {self.iteration:8d}/{self.train_iters:8d}",
            f"consumed samples: {self.consumed_samples:12d}",
            f"consumed tokens: {self.consumed_tokens:12d}",
            f"elapsed time per iteration (ms): {self.iteration_ms:.1f}",
            f"learning rate: {self.learning_rate:.3E}",
            *([] if decoupled is None else [f"decoupled learning rate: {decoupled:.3E}"]),
            f"global batch size: {self.global_batch_size:5d}",
            f"lm loss: {self.lm_loss:.6E}",
            *self._measurements(_AFTER_LOSS),
        ]
        if with_loss_scale:
            fields.append(f"loss scale: {self.loss_scale:.1f}")
        if self.grad_norm is not None:
            fields.append(f"grad norm: {self.grad_norm:.3f}")
        fields += self._measurements(_BEFORE_COUNTS)
        fields += [
            f"number of skipped iterations: {self.skipped_iterations:3d}",
            f"number of nan iterations: {self.nan_iterations:3d}",
            f"samples per second: {self.samples_per_second:.3f}",
            f"TFLOPs: {self.tflops:.2f}",
            *self._measurements(_AFTER_SPEED),
            f"done: {100 * self.iteration / self.train_iters:.1f}%",
            f"ETA: {timedelta(seconds=round(self.eta_s))}",
        ]
        return " " + " | ".join(fields) + " |"

    def compact_line(self) -> str:
        """Return a log line of at most 80 characters, for a terminal."""
        fields = [
            f"{self.iteration}/{self.train_iters}",
            f"loss {self.lm_loss:.4f}",
            f"lr {self.learning_rate:.2e}".replace("e-0", "e-"),
        ]
        if self.grad_norm is not None:
            fields.append(f"norm {self.grad_norm:.3g}")
        fields += [f"{self.samples_per_second:.3g} samples/s", f"ETA {_short(self.eta_s)}"]
        for name, count in (("skipped", self.skipped_iterations), ("NaN", self.nan_iterations)):
            if count:
                fields.append(f"{name} {count}")
        return " | ".join(fields)

    def record(self) -> dict[str, Any]:
        """Return the journal's record: the metrics under names of letters and digits."""
        record = asdict(self)
        measures = record.pop("measures")
        if self.decoupled_learning_rate is None:
            del record["decoupled_learning_rate"]
        return record | {journal_key(name): value for name, value in measures.items()}

    def _measurements(self, formats: Mapping[str, str]) -> list[str]:
        return [
            f"{name}: {format(self.measures[name], form)}"
            for name, form in formats.items()
            if name in self.measures
        ]


def journal_key(name: str) -> str:
    """Return the key of a measure in the journal: letters, digits and underscores."""
    return re.sub(r"\W+", "_", name.lower()).strip("_")


_OWN_KEYS = frozenset(
    ["event", *(field.name for field in fields(Interval))]
    + [journal_key(name) for name in (*_AFTER_LOSS, *_BEFORE_COUNTS, *_AFTER_SPEED)]
)
"""Keys of the journal's record of a log line."""


class PluginMetrics:
    """Meter of all of --metric; refuses names that the journal has for something else.

    Args:
        meters: by the name in --metric.
    """

    def __init__(self, meters: Mapping[str, Meter]):
        self._meters = meters

    def __call__(self, state: TrainState) -> Mapping[str, float]:
        """Return the numbers of all metrics after a step.

        Raises:
            ConfigError: a name is taken, or a value is neither an int nor a float.
        """
        found: dict[str, float] = {}
        for metric, meter in self._meters.items():
            values = meter(state)
            taken = _OWN_KEYS | {*map(journal_key, found)}
            for name, value in values.items():
                if not isinstance(value, int | float):
                    raise ConfigError(
                        f'--metric {metric} returns a {type(value).__name__} for "{name}": return '
                        "an int or a float"
                    )
                if journal_key(name) in taken or name.startswith(TIME):
                    raise ConfigError(
                        f'--metric {metric} returns "{name}", which the journal has for another '
                        "number: rename it"
                    )
            found |= values
        return found


class Report(Hook):
    """Logs loss, speed and memory every --log-interval iterations. For rank 0.

    Args:
        peak_flops: operations a second that one device can do at most; 0 if that is not known.
    """

    def __init__(self, plan: Plan, journal: Journal | None, *, peak_flops: float = 0.0):
        self._plan = plan
        self._peak_flops = peak_flops
        self._journal = journal
        self._steps: list[StepResult] = []
        self._has_logged_memory = False
        self._started: tuple[float, int] | None = None  # at, after so many samples

    def before_step(self, state: TrainState) -> None:
        """Record the start of the run."""
        if self._started is None:
            self._started = time.perf_counter(), state.samples

    def after_step(self, state: TrainState, step: StepResult) -> None:
        """Collect the step; log the interval when it is full."""
        self._steps.append(step)
        if state.iteration % self._plan.logging.interval:
            return
        interval = self._interval(state)
        self._steps.clear()
        log.info(self._line(interval))
        if self._journal:
            self._journal.write("train", interval.record())
        if times := times_in(step.measures):
            log.info(times_line(times))
        if not self._has_logged_memory:
            self._has_logged_memory = True
            log.info(memory_line(state.iteration))
            log.info(forecast_line(self._plan, interval.samples_per_second))

    def _line(self, interval: Interval) -> str:
        wanted = self._plan.logging.format
        if wanted == "compact" or (wanted == "auto" and sys.stdout.isatty()):
            return interval.compact_line()
        return interval.line(with_loss_scale=self._plan.precision.dtype == "fp16")

    def _interval(self, state: TrainState) -> Interval:
        plan, steps = self._plan, self._steps
        finite = [step.loss for step in steps if math.isfinite(step.loss)]
        means = _mean_terms(steps)
        seconds = sum(step.seconds for step in steps)
        samples = sum(step.batch_size for step in steps)
        model, flops = (
            sum(s.batch_size * flops_per_sample(plan, s.seq_length, recomputed=r) for s in steps)
            for r in (False, True)
        )
        devices_s = seconds * plan.parallel.world_size
        left = max(0, plan.training.train_samples - state.samples)
        return Interval(
            iteration=state.iteration,
            train_iters=plan.training.train_iters,
            consumed_samples=state.samples,
            consumed_tokens=state.tokens,
            iteration_ms=1000 * seconds / len(steps),
            learning_rate=steps[-1].lr,
            decoupled_learning_rate=steps[-1].embedding_lr,
            global_batch_size=steps[-1].batch_size,
            lm_loss=means.pop(LM_LOSS, _mean_of_finite([step.loss for step in steps])),
            loss_scale=steps[-1].loss_scale,
            grad_norm=steps[-1].grad_norm,
            measures={
                **{name: x for name, x in steps[-1].measures.items() if name != LM_LOSS},
                **means,
                **self._utilisation(model / devices_s, flops / devices_s),
            },
            skipped_iterations=sum(step.skipped for step in steps),
            nan_iterations=len(steps) - len(finite),
            samples_per_second=samples / seconds,
            tflops=flops / devices_s / 1e12,
            eta_s=left * self._seconds_per_sample(state, seconds / samples),
        )

    def _utilisation(self, model_flops: float, hardware_flops: float) -> dict[str, float]:
        """Return MFU and HFU, the utilisation of a device's peak, where they are known.

        Adapters cannot: what they do not train has no gradient, which the formula counts.
        """
        if not self._peak_flops or self._plan.model.lora:
            return {}
        return {MFU: model_flops / self._peak_flops, HFU: hardware_flops / self._peak_flops}

    def _seconds_per_sample(self, state: TrainState, of_steps: float) -> float:
        """Return the seconds per sample since the run began; `of_steps` before the first."""
        if self._started is None or state.samples <= self._started[1]:
            return of_steps
        started_at, samples = self._started
        return (time.perf_counter() - started_at) / (state.samples - samples)


def _short(seconds: float) -> str:
    """Return a duration in its two largest units."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    units = [(days, "d"), (h, "h"), (m, "m"), (s, "s")]
    first = next((i for i, (count, _) in enumerate(units) if count), len(units) - 1)
    return " ".join(f"{count}{unit}" for count, unit in units[first : first + 2])


def _mean_terms(steps: Sequence[StepResult]) -> dict[str, float]:
    """Return the means of the terms of the loss over `steps`, by name."""
    return {
        name: _mean_of_finite([step.measures[name] for step in steps])
        for name in (LM_LOSS, *_AFTER_LOSS)
        if name in steps[-1].measures
    }


def _mean_of_finite(values: Iterable[float]) -> float:
    """Return the mean of `values` without NaN and infinite ones; NaN if no other is left."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def flops_per_sample(plan: Plan, seq_length: int, *, recomputed: bool = True) -> float:
    """Return the floating-point operations of a sample of this many tokens in a step.

    Args:
        recomputed: whether what is computed again counts as well.
    """
    model = replace(plan.model, seq_length=seq_length)
    return model.flops_per_sample(recompute=plan.recompute if recomputed else NOTHING)


def peak_flops_of(plan: Plan) -> float:
    """Return the peak FLOPS of a device of this run; 0 if unknown."""
    if plan.logging.device_peak_tflops:
        return 1e12 * plan.logging.device_peak_tflops
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return 0.0
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    device = known_device(properties.name, properties.total_memory)
    return device.peak_flops(plan.precision.dtype) if device else 0.0


def times_line(seconds: Mapping[str, float]) -> str:
    """Return the line of timers, in milliseconds."""
    parts = (f" | {name}: {1000 * value:.2f}" for name, value in seconds.items())
    return "time (ms)" + "".join(parts)


def memory_line(iteration: int) -> str:
    """Return the peak memory of this process."""
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    line = f"[Rank 0] (after {iteration} iterations) memory (MB) | max resident: {peak_mib:.1f}"
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        line += (
            f" | allocated: {torch.cuda.memory_allocated() / 2**20:.1f}"
            f" | max allocated: {torch.cuda.max_memory_allocated() / 2**20:.1f}"
            f" | reserved: {torch.cuda.memory_reserved() / 2**20:.1f}"
            f" | max reserved: {torch.cuda.max_memory_reserved() / 2**20:.1f}"
        )
    return line
