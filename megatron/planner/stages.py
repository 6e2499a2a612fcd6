"""Pipeline stages of a plan."""

from functools import lru_cache, partial

from megatron.config.architecture.architecture import network_of
from megatron.config.architecture.counts import Branches
from megatron.config.network.model_spec import ModelSpec
from megatron.config.parallelism.layout import ParallelPlan
from megatron.config.plan.plan import Plan
from megatron.pipeline.stages import Stage, stages_of_network
from megatron.planner.frozen import with_frozen


def stages_of(plan: Plan) -> list[Stage]:
    """Return the stages of the plan's network, in order; one without a pipeline."""
    mixed = plan.precision.is_mixed
    if plan.optimizer.frozen:
        mark = partial(with_frozen, plan)
        return stages_of_network(plan.model, plan.parallel, mixed=mixed, mark=mark)
    try:
        return [*_stages(plan.model, plan.parallel, mixed)]
    except TypeError:  # values of a plugin's flags may be lists, which have no hash
        return stages_of_network(plan.model, plan.parallel, mixed=mixed)


def branches_of(spec: ModelSpec, stage: Stage) -> Branches:
    """Return the residual branches of the layers of a stage, and of its depths of prediction."""
    depths = Branches(stage.depths, stage.depths)
    network = network_of(spec)
    return sum((network.branches(spec, number) for number in stage.layers), depths)


@lru_cache(maxsize=4)  # an estimate needs those of one plan many times
def _stages(spec: ModelSpec, parallel: ParallelPlan, mixed: bool) -> tuple[Stage, ...]:
    return tuple(stages_of_network(spec, parallel, mixed=mixed))
