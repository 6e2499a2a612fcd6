"""Size of a checkpoint, in bytes."""

from megatron.config.plan import Plan
from megatron.planner.activations import BYTES


def checkpoint_bytes(plan: Plan) -> int:
    """Return the bytes of all weights and, where it is saved, of the optimizer, at least."""
    each = BYTES[plan.precision.dtype]
    if plan.checkpoint.saves_optimizer:
        has_masters = plan.precision.is_mixed or plan.parallel.zero_stage > 0
        each += plan.optimizer.state_bytes + 4 * has_masters
    return plan.model.num_parameters * each
