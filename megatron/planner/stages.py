"""Pipeline stages of a plan."""

from functools import partial

from megatron.config.plan.plan import Plan
from megatron.pipeline.stages import Stage, stages_of_network
from megatron.planner.frozen import with_frozen


def stages_of(plan: Plan) -> list[Stage]:
    """Return the stages of the plan's network, in order; one without a pipeline."""
    return stages_of_network(
        plan.model,
        plan.parallel,
        mixed=plan.precision.is_mixed,
        mark=partial(with_frozen, plan) if plan.optimizer.frozen else list,
    )
