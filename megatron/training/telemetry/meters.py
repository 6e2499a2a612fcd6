"""Meters of the model after a step (metrics), on all ranks in step."""

from collections.abc import Callable, Mapping

from megatron.checkpointing.train_state import TrainState
from megatron.config.optimization.curriculum import CurriculumPlan
from megatron.config.plan.plan import Plan
from megatron.config.run.logging import LoggingPlan
from megatron.engine.engine import Engine
from megatron.model.layers.moe_aux_loss import ExpertLoad
from megatron.training.loop.loop import Meter
from megatron.training.telemetry.memory import worst_memory

MOE_LOSS = "moe loss"
BUSIEST, LOAD_ENTROPY, DROPPED = "moe max load", "moe load entropy", "moe dropped"
NUM_ZEROS, PARAMS_NORM, SEQ_LENGTH = "num zeros", "params norm", "curriculum seqlen"
ENERGY, CO2 = "energy (kWh)", "CO2 (kg)"


TIME = "time/"
"""Prefix of the names of parts of a step whose seconds are measured."""


def times_in(measures: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds per step of each timed part among `measures`."""
    return {
        name.removeprefix(TIME): seconds
        for name, seconds in measures.items()
        if name.startswith(TIME)
    }


def build_meters(engine: Engine, plan: Plan) -> list[Meter]:
    """Return the meters of the plan."""
    meters: list[Meter] = [_at_log_lines(worst_memory, plan.logging.interval)]
    if engine.has_loss_terms:
        meters.append(lambda state: engine.pop_loss_terms())
    if plan.model.moe:
        meters.append(lambda state: _expert_measures(engine.expert_load))
    if plan.logging.num_zeros:
        meters.append(lambda state: {NUM_ZEROS: engine.num_zeros or 0.0})
    if plan.logging.params_norm:
        meters.append(_when_logged(engine.params_norm, PARAMS_NORM, plan.logging))
    if plan.curriculum.schedule:
        meters.append(_seq_length(plan.curriculum))
    if plan.logging.timing_level:
        meters.append(_times(engine.pop_timers, plan.logging.interval))
    return meters


def _expert_measures(load: ExpertLoad | None) -> Mapping[str, float]:
    """Return the log fields of mixtures of experts after a step."""
    if load is None:
        return {}
    return {
        MOE_LOSS: load.loss,
        BUSIEST: load.busiest(),
        LOAD_ENTROPY: load.entropy(),
        DROPPED: load.dropped,
    }


def _at_log_lines(measure: Callable[[], Mapping[str, float]], interval: int) -> Meter:
    return lambda state: {} if state.iteration % interval else measure()


def _times(take: Callable[[], Mapping[str, float]], interval: int) -> Meter:
    """Return a meter of the mean seconds per step of each part, over the steps of a log line."""
    steps = 0

    def meter(state: TrainState) -> Mapping[str, float]:
        nonlocal steps
        steps += 1
        if state.iteration % interval:
            return {}
        means = {TIME + name: seconds / steps for name, seconds in take().items()}
        steps = 0
        return means

    return meter


def _when_logged(measure: Callable[[], float], name: str, logging: LoggingPlan) -> Meter:
    """Return a meter that measures only at steps that are logged."""
    intervals = {logging.interval}
    if logging.tensorboard_dir or logging.wandb.project:
        intervals.add(logging.tensorboard_interval)

    def meter(state: TrainState) -> Mapping[str, float]:
        due = any(state.iteration % interval == 0 for interval in intervals)
        return {name: measure()} if due else {}

    return meter


def _seq_length(plan: CurriculumPlan) -> Meter:
    return lambda state: {SEQ_LENGTH: plan.length_at(state.iteration)}
