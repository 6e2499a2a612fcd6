"""Pipeline stages of a plan."""

from megatron.config.plan.plan import Plan
from megatron.pipeline.stages import Stage, stages_of_network


def stages_of(plan: Plan) -> list[Stage]:
    """Return the stages of the plan's network, in order; one without a pipeline."""
    return stages_of_network(plan.model, plan.parallel, mixed=plan.precision.is_mixed)
