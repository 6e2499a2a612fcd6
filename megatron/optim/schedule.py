"""The learning rate, a function of the training samples: resume has nothing to restore."""

import math

from megatron.plan.schedule_plan import SchedulePlan


def learning_rate(samples: int, plan: SchedulePlan) -> float:
    """Return the learning rate after `samples` training samples.

    Linear from 0 to the peak over the warm-up, then the plan's style down to the floor at
    `decay_samples` (counted from the start of training), then the floor; "constant" stays at
    the peak.

    >>> plan = SchedulePlan(
    ...     style="cosine", peak=1.0, floor=0.0, warmup_samples=100, decay_samples=1100
    ... )
    >>> learning_rate(50, plan)
    0.5
    >>> learning_rate(600, plan)
    0.5
    """
    if plan.warmup_samples and samples <= plan.warmup_samples:
        return plan.peak * samples / plan.warmup_samples
    if plan.style == "constant":
        return plan.peak
    if samples > plan.decay_samples:
        return plan.floor
    progress = (samples - plan.warmup_samples) / (plan.decay_samples - plan.warmup_samples)
    falls = {"linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    return plan.floor + (plan.peak - plan.floor) * falls[plan.style]
