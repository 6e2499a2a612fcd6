"""Loss spikes: roll back to an earlier checkpoint and skip the samples of the spike."""

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

from megatron.checkpointing.manifest import iteration_of, published_tags
from megatron.checkpointing.remote import set_aside
from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import TrainingError
from megatron.config.plan.plan import Plan
from megatron.config.run.guards import SpikePlan
from megatron.engine.engine import Engine
from megatron.training.checkpoints.checkpoint_choice import (
    Chosen,
    chosen_by_rank_0,
    newest_readable,
    warn_passed_over,
)
from megatron.training.checkpoints.resume import damage_of, load
from megatron.training.loop.collectives import any_rank, from_rank_0
from megatron.training.loop.journal import ROLLBACK, Journal, read_journal
from megatron.training.loop.loop import Hook, StepResult
from megatron.training.telemetry.step_records import STEP, recorded_loss

log = logging.getLogger(__name__)

_TO_DEVIATION = 1.4826
_LEAST_SPREAD = 1e-4


class Spike(Exception):
    """A loss spike in a step; caught where the run can roll back."""

    def __init__(self, iteration: int, message: str):
        super().__init__(message)
        self.iteration = iteration


@dataclass(frozen=True)
class Watched:
    """Loss and gradient norm of a step, by which spikes are found."""

    loss: float
    norm: float | None


class SpikeGuard(Hook):
    """Raises Spike after a step with a loss spike. For all ranks.

    Args:
        before: the steps before, the oldest first.
    """

    def __init__(self, policy: SpikePlan, before: Sequence[Watched]):
        self._policy = policy
        self._before = deque(before, maxlen=policy.window)

    def after_step(self, state: TrainState, step: StepResult) -> None:
        """Judge the step.

        Raises:
            Spike: it is one, on every rank.

        Communication: one all-reduce of a byte.
        """
        watched = Watched(step.loss, step.grad_norm)
        message = self._judge(watched)
        if any_rank([bool(message)])[0]:
            raise Spike(state.iteration, message or "another rank sees a spike")
        self._before.append(watched)

    def _judge(self, step: Watched) -> str:
        """Return why the step is a spike; "" if it is none."""
        if len(self._before) < self._policy.window:
            return ""
        for name, limit, value, before in (
            ("loss", self._policy.zscore, step.loss, [b.loss for b in self._before]),
            ("gradient norm", self._policy.norm, step.norm, [b.norm for b in self._before]),
        ):
            known = [number for number in before if number is not None and math.isfinite(number)]
            # NaN is not for this guard: it never reaches the weights.
            if not limit or value is None or not math.isfinite(value) or len(known) < 2:
                continue
            if (z := robust_zscore(value, known)) > limit:
                return f"{name} {value:.6g} with a z-score of {z:.3g} over {len(known)} steps"
        return ""


def robust_zscore(value: float, before: Sequence[float]) -> float:
    """Return the number of deviations that `value` lies above the median of `before`.

    The deviation is the standard deviation of a normal distribution with the same median absolute
    deviation, but at least 1/10000 of the median, so that among equal values not every different
    one is a spike.

    Source: Iglewicz and Hoaglin, How to Detect and Handle Outliers (1993).
    """
    center = median(before)
    spread = _TO_DEVIATION * median(abs(number - center) for number in before)
    return (value - center) / max(spread, _LEAST_SPREAD * abs(center), math.ulp(1.0))


def steps_before(save: Path, policy: SpikePlan) -> list[Watched]:
    """Return the last steps in the journal, as many as are compared with.

    Communication: every rank must call this, in step; rank 0 reads.
    """

    def read() -> list[Watched]:
        records = (r for r in read_journal(save, warns=False) if r["event"] == STEP)
        last = deque(records, maxlen=policy.window)
        return [Watched(recorded_loss(r), r.get("grad_norm")) for r in last]

    return from_rank_0(read)


def go_back(
    engine: Engine, plan: Plan, state: TrainState, spike: Spike, journal: Journal | None
) -> None:
    """Put the run where a checkpoint before `spike` was saved, with the samples to be skipped.

    Raises:
        TrainingError: there were too many, or there is no checkpoint to go back to.

    Communication: every rank must call this, in step.
    """
    policy, save = plan.guards.spikes, Path(plan.checkpoint.save)
    message = f"iteration {spike.iteration}: {spike}"
    if len(state.spikes) >= policy.most:
        raise TrainingError(
            f"{message}, after {len(state.spikes)} others: the run ends as --spike-policy requires, and "
            "its checkpoints are as they were; lower --lr, or continue with a larger max"
        )
    chosen = chosen_by_rank_0(lambda: _before(save, spike.iteration, policy.rollback))
    while chosen and (problems := damage_of(chosen)):
        warn_passed_over(chosen.folder, "; ".join(problems), chosen.passed_over)
        older = partial(newest_readable, save, chosen.older, chosen.passed_over + 1)
        chosen = chosen_by_rank_0(older)
    if chosen is None:
        raise TrainingError(
            f"{message}: --spike-policy finds no checkpoint to go back to in --save {save}: lower "
            "--save-interval or --lr"
        )
    iteration = chosen.manifest.state.iteration
    first = max(spike.iteration - policy.skip + 1, iteration + 1)
    passed = (first, spike.iteration + policy.after)
    log.warning(
        "%s: rolling back to %s and skipping iterations %d to %d (%d of at most %d)",
        *(message, chosen.folder, *passed, len(state.spikes) + 1, policy.most),
    )
    spikes = (*state.spikes, passed)
    everything = replace(
        plan.checkpoint, loads_optimizer=True, loads_streams=True, loads_progress=True
    )
    load(engine, replace(plan, checkpoint=everything), chosen)
    state.load(chosen.manifest.state)
    state.spikes = spikes
    from_rank_0(lambda: set_aside(save, iteration))
    if journal:
        record = {"iteration": iteration, "spike": spike.iteration, "why": str(spike)}
        # All of them: one that went further back leaves no trace of earlier ones.
        journal.write(ROLLBACK, {**record, "passed_over": passed, "all_passed_over": spikes})


def _before(save: Path, iteration: int, count: int) -> Chosen | None:
    """Return the checkpoint that is number `count` before `iteration`, or the oldest.

    A checkpoint with a damaged manifest is skipped for an older one.
    """
    tags = [tag for tag in published_tags(save) if (iteration_of(tag) or 0) < iteration]
    return newest_readable(save, tags[min(count, len(tags)) - 1 :]) if tags else None
