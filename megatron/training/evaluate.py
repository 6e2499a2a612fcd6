"""The loss on held-out data, during and after training."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.engine.engine import Engine
from megatron.plan.plan import Plan
from megatron.training.journal import Journal
from megatron.training.loop import StepResult
from megatron.training.state import TrainState
from megatron.training.tensorboard import TensorBoard

log = logging.getLogger(__name__)

Batches = Callable[[int], Iterator[Any]]
"""Yields micro-batches from a number of consumed samples on."""


class Evaluation:
    """Evaluates on the validation set every --eval-interval iterations. For all ranks.

    Args:
        journal: rank 0's, None elsewhere.
        tensorboard: rank 0's, None elsewhere.
    """

    def __init__(
        self,
        engine: Engine,
        valid: Batches,
        plan: Plan,
        *,
        journal: Journal | None,
        tensorboard: TensorBoard | None,
    ):
        self._engine = engine
        self._valid = valid
        self._plan = plan
        self._journal = journal
        self._tensorboard = tensorboard

    def after_step(self, state: TrainState, step: StepResult) -> None:
        """Evaluate when it is due."""
        if state.iteration % self._plan.evaluation.interval == 0:
            self.validate(state, f"iteration {state.iteration}")

    def validate(self, state: TrainState, when: str) -> float:
        """Return the loss on the next samples of the validation set, after telling it."""
        loss = self._run("valid", self._valid(state.valid_samples), state, when)
        state.valid_samples += self._plan.evaluation.iters * self._plan.batch.global_batch_size
        return loss

    def test(self, batches: Iterator[Any], state: TrainState) -> float:
        """Return the loss on the test set, after telling it."""
        return self._run("test", batches, state, "the end of training for test data")

    def _run(self, name: str, batches: Iterator[Any], state: TrainState, when: str) -> float:
        batch = self._plan.batch
        micro_batches = batch.num_micro_batches(batch.global_batch_size)
        losses: Sequence[float] = [
            float(self._engine.evaluate(batches, micro_batches))
            for _ in range(self._plan.evaluation.iters)
        ]
        loss = sum(losses) / len(losses)
        ppl = math.exp(min(20, loss))
        text = f"{name} loss at {when} | lm loss value: {loss:.6E} | lm loss PPL: {ppl:.6E} | "
        log.info("%s\n%s\n%s", "-" * len(text), text, "-" * len(text))
        record = {"set": name, "iteration": state.iteration, "lm_loss": loss, "ppl": ppl}
        if self._journal:
            self._journal.write("evaluation", record)
        if self._tensorboard:
            self._tensorboard.after_evaluation(name, loss, ppl, state)
        return loss
