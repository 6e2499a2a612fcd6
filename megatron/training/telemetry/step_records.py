"""Step records of the journal: loss, learning rate, samples and time of each step."""

import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.checkpointing.train_state import TrainState
from megatron.config.data.objective import LM_LOSS, SOP_LOSS
from megatron.training.loop.journal import Journal, now
from megatron.training.loop.loop import Hook, StepResult

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
            **_losses(step),
            **({} if step.grad_norm is None else {"grad_norm": step.grad_norm}),
            "learning_rate": step.lr,
            **_decoupled(step),
            "loss_scale": step.loss_scale,
            "skipped": step.skipped,
            "seconds": step.seconds,
            "at": now(),
            "host": self._host,
        }
        self._journal.write(STEP, record)


def _decoupled(step: StepResult) -> dict[str, float]:
    """Return the learning rate of embedding and output layer, if it is a separate one."""
    return {} if step.embedding_lr is None else {"decoupled_learning_rate": step.embedding_lr}


def _losses(step: StepResult) -> dict[str, float]:
    """Return the loss of a record; for several terms, each of them and the total as `loss`."""
    if LM_LOSS not in step.measures:
        return {"lm_loss": step.loss}
    others = {"sop_loss": step.measures[SOP_LOSS]} if SOP_LOSS in step.measures else {}
    return {"lm_loss": step.measures[LM_LOSS], **others, "loss": step.loss}


def recorded_loss(record: Mapping[str, Any]) -> float:
    """Read the loss that a step trained with; NaN where it is null."""
    return number(record.get("loss", record["lm_loss"]))


def number(value: float | None) -> float:
    """Return `value`, which the journal has as null where it is NaN."""
    return math.nan if value is None else value


@dataclass(frozen=True)
class RecordedStep:
    """A step, read from its record."""

    state: TrainState
    step: StepResult


def read_step(record: Mapping[str, Any]) -> RecordedStep:
    """Read a step from its record; a null loss is NaN, a null norm infinite."""
    norm = record.get("grad_norm")
    terms = {LM_LOSS: "lm_loss", SOP_LOSS: "sop_loss"} if "loss" in record else {}
    return RecordedStep(
        TrainState(
            iteration=record["iteration"], samples=record["samples"], tokens=record["tokens"]
        ),
        StepResult(
            loss=recorded_loss(record),
            lr=record["learning_rate"],
            batch_size=record["samples"] - record["first_sample"],
            seq_length=record["seq_length"],
            seconds=record["seconds"],
            grad_norm=math.inf if norm is None and "grad_norm" in record else norm,
            loss_scale=record["loss_scale"],
            skipped=record["skipped"],
            measures={name: number(record[key]) for name, key in terms.items() if key in record},
        ),
    )
