"""Step records of the journal: loss, learning rate, samples and time of each step."""

import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.training.loop.journal import Journal, now
from megatron.training.loop.loop import Hook, StepResult
from megatron.training.loop.state import TrainState

STEP = "step"


class StepRecords(Hook):
    """Writes a record of each step, known by run, attempt and iteration. For rank 0."""

    def __init__(self, journal: Journal):
        self._journal = journal
        self._host = socket.gethostname()

    def after_step(self, state: TrainState, step: StepResult) -> None:
        """Write the step's record."""
        record = {
            "run": self._journal.run,
            "attempt": self._journal.attempt,
            "iteration": state.iteration,
            "first_sample": state.samples - step.batch_size,
            "samples": state.samples,
            "tokens": state.tokens,
            "seq_length": step.seq_length,
            "lm_loss": step.loss,
            **({} if step.grad_norm is None else {"grad_norm": step.grad_norm}),
            "learning_rate": step.lr,
            "loss_scale": step.loss_scale,
            "skipped": step.skipped,
            "seconds": step.seconds,
            "at": now(),
            "host": self._host,
        }
        self._journal.write(STEP, record)


@dataclass(frozen=True)
class RecordedStep:
    """A step, read from its record."""

    state: TrainState
    step: StepResult


def read_step(record: Mapping[str, Any]) -> RecordedStep:
    """Read a step from its record; a null loss is NaN, a null norm infinite."""
    loss, norm = record["lm_loss"], record.get("grad_norm")
    return RecordedStep(
        TrainState(
            iteration=record["iteration"], samples=record["samples"], tokens=record["tokens"]
        ),
        StepResult(
            loss=float("nan") if loss is None else loss,
            lr=record["learning_rate"],
            batch_size=record["samples"] - record["first_sample"],
            seq_length=record["seq_length"],
            seconds=record["seconds"],
            grad_norm=math.inf if norm is None and "grad_norm" in record else norm,
            loss_scale=record["loss_scale"],
            skipped=record["skipped"],
        ),
    )
