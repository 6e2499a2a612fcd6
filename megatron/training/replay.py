"""Replay of a step from a checkpoint before it, compared with its journal record."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import TrainingError
from megatron.config.plan.plan import Plan
from megatron.data.datasets.datasets import build_datasets
from megatron.data.sampling.batch_sampler import SampleSource
from megatron.data.sampling.provenance import lines_of_step
from megatron.engine.engine import Engine
from megatron.tokenizer.types.tokenizer import Tokenizer
from megatron.training.guards.skip_samples import Skip
from megatron.training.loop.batch_stream import Stream
from megatron.training.loop.collectives import from_rank_0
from megatron.training.loop.journal import ROLLBACK, read_journal
from megatron.training.loop.loop import Hook, StepResult, train
from megatron.training.run import schedule_of
from megatron.training.telemetry.step_records import STEP, read_step

log = logging.getLogger(__name__)

_DIFFERENT = "| different"
_TEXT = 100  # characters
_COMPARED = ("loss", "grad_norm", "lr", "loss_scale", "batch_size", "seq_length", "skipped")


def quiet(plan: Plan) -> Plan:
    """Return `plan` for a run that saves and writes nothing."""
    return replace(
        plan,
        checkpoint=replace(plan.checkpoint, save="", must_exist=False),
        # Stack dumps of a hang are written to --save.
        watch=replace(plan.watch, hang_timeout_s=0.0),
        logging=replace(
            plan.logging,
            flags_directory="",
            profile=replace(plan.logging.profile, directory=""),
            energy=replace(plan.logging.energy, directory=""),
        ),
    )


class _Last(Hook):
    """Hook that keeps the result of the last step."""

    iteration = 0
    step: StepResult | None = None

    def after_step(self, state: TrainState, step: StepResult) -> None:
        """Keep the result."""
        self.iteration, self.step = state.iteration, step


def replay(
    engine: Engine,
    plan: Plan,
    state: TrainState,
    stream: Stream,
    *,
    samples: SampleSource,
    tokenizer: Tokenizer,
) -> None:
    """Take the steps up to --replay-step and compare that one with the journal in --load.

    Args:
        samples: the source of `stream`.

    Raises:
        TrainingError: the journal has no record of the step, or one that differs.

    Communication: every rank must call this, in step.
    """
    number = plan.guards.replay_step
    record, spikes = from_rank_0(lambda: recorded_step(Path(plan.checkpoint.load), number))
    state.spikes = spikes or state.spikes
    log.info("repeating iterations %d to %d", state.iteration + 1, number)
    last = _Last()
    skip = Skip(
        plan.training.skips,
        train_iters=plan.training.train_iters,
        batch_size=plan.batch.size_at,
        stream=stream,
    )
    train(
        engine,
        stream,
        schedule=schedule_of(plan),
        state=state,
        hooks=[skip, last],
        stop=lambda state: "replayed" if state.iteration >= number else None,
    )
    stream.close()  # its thread reads the samples too
    if last.iteration != number or last.step is None:
        raise TrainingError(
            f"--replay-step {number}: the iterations up to {state.iteration} are skipped; give "
            "the --skip-train-iteration-range of the run"
        )
    lines = list(comparison(read_step(record).step, last.step))
    log.info("step %d of attempt %d, repeated:\n%s", number, record["attempt"], "\n".join(lines))
    if dist.get_rank() == 0 and not plan.data.is_random:  # random tokens are of no document
        log.info("%s", "\n".join(_samples(record, plan, samples, tokenizer)))
    if any(line.endswith(_DIFFERENT) for line in lines):
        raise TrainingError(
            f"step {number} differs from the journal; with the same command, layout and software it is "
            "equal, bit for bit, unless a device or a file is damaged"
        )
    log.info("step %d equals the journal, bit for bit", number)


def comparison(then: StepResult, now: StepResult) -> Iterator[str]:
    """Yield a line for each value of a step, compared with its record."""
    for name in _COMPARED:
        recorded, found = getattr(then, name), getattr(now, name)
        # repr: a NaN is unequal to itself, and every float has a unique repr.
        equal = "| equal" if repr(recorded) == repr(found) else _DIFFERENT
        yield f"  {name}: {found} | journal {recorded} {equal}"


def _samples(
    record: dict[str, Any], plan: Plan, samples: SampleSource, tokenizer: Tokenizer
) -> Iterator[str]:
    """Yield the origins of a step's samples, and the starts of their texts."""
    data = replace(plan.data, valid=(), test=())
    length, seed = plan.model.seq_length, plan.training.seed
    return lines_of_step(
        record["first_sample"],
        record["samples"],
        sources=build_datasets(data, seq_length=length, seed=seed).train,
        texts=samples,
        tokenizer=tokenizer,
        batch=plan.batch,
        most=_TEXT,
    )


def recorded_step(
    directory: Path, number: int
) -> tuple[dict[str, Any], tuple[tuple[int, int], ...]]:
    """Return the journal's record of a step, and the spikes of the attempt that took it."""
    records = list(read_journal(directory))
    steps: Sequence[dict[str, Any]] = [
        record for record in records if record["event"] == STEP and record["iteration"] == number
    ]
    if not steps:
        raise TrainingError(
            f"--replay-step {number}: the journal in --load {directory} has no record of that step"
        )
    rollbacks = [record for record in records if record["event"] == ROLLBACK]
    spikes = rollbacks[-1].get("all_passed_over", []) if rollbacks else []
    return steps[-1], tuple((first, last) for first, last in spikes)
