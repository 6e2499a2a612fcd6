"""The loss on held-out data, during and after training."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron.checkpointing.train_state import TrainState
from megatron.config.data.objective import LM_LOSS, UNMASKED
from megatron.config.plan.plan import Plan
from megatron.engine.engine import Engine
from megatron.training.loop.batch_stream import Batches
from megatron.training.loop.journal import Journal
from megatron.training.loop.loop import Hook, StepResult
from megatron.training.telemetry.report import journal_key
from megatron.training.telemetry.tensorboard import TensorBoard

log = logging.getLogger(__name__)


class _Left(Exception):
    """Raised to leave an evaluation when the run ends."""


def _never() -> bool:
    return False


class Evaluation(Hook):
    """Evaluates on each validation set every --eval-interval iterations. For all ranks.

    Args:
        valid: validation sets by name; unused with --eval-iters 0.
        journal: rank 0's, None elsewhere.
        tensorboard: rank 0's, None elsewhere.
        after_batch: called after each global batch.
    """

    def __init__(
        self,
        engine: Engine,
        valid: Mapping[str, Batches],
        plan: Plan,
        *,
        journal: Journal | None,
        tensorboard: TensorBoard | None,
        after_batch: Callable[[], None] = lambda: None,
    ):
        self._engine = engine
        self._valid = valid if plan.evaluation.iters else {}
        self._plan = plan
        self._journal = journal
        self._tensorboard = tensorboard
        self._after_batch, self._ends = after_batch, _never

    def stop_when(self, ends: Callable[[], bool]) -> None:
        """Wait for no further batch of an evaluation between steps when the run is to end.

        Args:
            ends: whether it is; called on all ranks in step.
        """
        self._ends = ends

    def after_step(self, state: TrainState, step: StepResult) -> None:
        """Evaluate when it is due; stop early when the run is to end."""
        if not self._plan.evaluation.is_due(state.iteration):
            return
        try:
            self.validate(state, f"iteration {state.iteration}", ends=self._ends)
        except _Left:
            log.warning(
                "the evaluation at iteration %d is interrupted: the run is to end", state.iteration
            )

    def validate_at_end(self, state: TrainState) -> dict[str, float]:
        """Log and return the loss on the next samples of each validation set, without counting them.

        A run that continues with more steps then evaluates on the samples of the uninterrupted run,
        which are as many as its validation sets were built for.
        """
        first = state.valid_samples
        return self._validate_from(first, state, "the end of training for val data", _never)

    def validate(
        self, state: TrainState, when: str, *, ends: Callable[[], bool] = _never
    ) -> dict[str, float]:
        """Log and return the loss on the next samples of each validation set."""
        first = state.valid_samples
        # Counted once: all sets are read in step, from the same position. Counted also when it is
        # left, so that the next evaluation reads what it would have read.
        state.valid_samples += self._plan.evaluation.samples
        return self._validate_from(first, state, when, ends)

    def _validate_from(
        self, first: int, state: TrainState, when: str, ends: Callable[[], bool]
    ) -> dict[str, float]:
        return {
            name: self._run(name, batches(first), state, when, ends)
            for name, batches in self._valid.items()
        }

    def test(self, sets: Mapping[str, Batches], state: TrainState) -> dict[str, float]:
        """Log and return the loss on the first samples of each test set."""
        return {
            name: self._run(name, batches(0), state, "the end of training for test data", _never)
            for name, batches in sets.items()
        }

    def _run(
        self,
        name: str,
        batches: Iterator[Any],
        state: TrainState,
        when: str,
        ends: Callable[[], bool],
    ) -> float:
        batch = self._plan.evaluation.batch
        micro_batches = batch.num_micro_batches(batch.global_batch_size)
        # Samples of full length, however short training samples are.
        self._engine.set_seq_length(
            self._plan.model.seq_length, micro_batch_size=batch.micro_batch_size
        )
        losses, all_terms = [], []
        for _ in range(self._plan.evaluation.iters):
            if ends():
                raise _Left
            losses.append(float(self._engine.evaluate(batches, micro_batches)))
            all_terms.append(self._engine.pop_loss_terms())
            self._after_batch()
        total = sum(losses) / len(losses)
        means = {
            term: sum(each[term] for each in all_terms) / len(all_terms)
            for term in all_terms[0]
            if term != UNMASKED  # of training
        }
        self._report(name, {LM_LOSS: total} | means, state, when)
        return total

    def _report(self, name: str, terms: Mapping[str, float], state: TrainState, when: str) -> None:
        """Log the loss terms of the data set `name`; terms that are losses also as perplexities."""
        values = (
            f"{term} value: {value:.6E} | "
            + (f"{term} PPL: {_perplexity(value):.6E} | " if term.endswith(" loss") else "")
            for term, value in terms.items()
        )
        text = f"{name} loss at {when} | {''.join(values)}"
        log.info("%s\n%s\n%s", "-" * len(text), text, "-" * len(text))
        loss, ppl = terms[LM_LOSS], _perplexity(terms[LM_LOSS])
        others = {journal_key(term): value for term, value in terms.items() if term != LM_LOSS}
        record = {"set": name, "iteration": state.iteration, "lm_loss": loss, "ppl": ppl}
        if self._journal:
            self._journal.write("evaluation", others | record)
        if self._tensorboard:
            self._tensorboard.after_evaluation(name, loss, ppl, state, others=others)


def _perplexity(loss: float) -> float:
    """Return exp(loss), bounded so that it can be drawn; NaN for a loss that is NaN."""
    return math.nan if math.isnan(loss) else math.exp(min(20, loss))
