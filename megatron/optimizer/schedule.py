"""Learning-rate and weight-decay schedules, stateless functions of consumed samples and tokens."""

import math
from collections.abc import Callable, Mapping

from megatron.common.registry import SCHEDULES
from megatron.config.optimization.lr_schedule import SchedulePlan
from megatron.config.optimization.optimizer import OptimizerPlan


def learning_rate(plan: SchedulePlan, *, samples: int, tokens: int) -> float:
    """Return the learning rate of the step after `samples` and `tokens` have been trained on.

    Linear from `init` to the peak over the warm-up, then the plan's style down to the floor at
    `decay` (counted from the start of training), then the floor; "constant" stays at the peak.

    Source: Megatron-LM's learning-rate flags; inverse-square-root: arXiv:1706.03762, section 5.3,
    scaled to the peak at the end of the warm-up; WSD: arXiv:2404.06395, section 4.

    >>> plan = SchedulePlan(
    ...     unit="samples",
    ...     style="cosine",
    ...     init=0.0,
    ...     peak=1.0,
    ...     floor=0.0,
    ...     warmup=100,
    ...     decay=1100,
    ...     anneal=0,
    ...     anneal_style="linear",
    ...     on_resume="equal",
    ... )
    >>> learning_rate(plan, samples=50, tokens=0)
    0.5
    >>> learning_rate(plan, samples=600, tokens=0)
    0.5
    """
    consumed = tokens if plan.unit == "tokens" else samples
    rising, span = (
        (samples, plan.warmup_samples) if plan.warmup_samples else (consumed, plan.warmup)
    )
    if span and rising <= span:
        return plan.init + (plan.peak - plan.init) * rising / span
    if plan.style == "constant":
        return plan.peak
    if consumed > plan.decay:
        return plan.floor
    if plan.style == "inverse-square-root":
        rate = plan.peak * math.sqrt(max(plan.warmup, 1) / max(consumed, 1))
        return max(plan.floor, rate)
    if plan.style == "WSD":
        progress = max(0.0, (consumed - (plan.decay - plan.anneal)) / plan.anneal)
        share = _FALLS[plan.anneal_style](progress)
    else:
        is_own = plan.style in SCHEDULES
        fall = SCHEDULES.get(plan.style, plan.own_flags) if is_own else _FALLS[plan.style]
        share = fall((consumed - plan.warmup) / (plan.decay - plan.warmup))
    return plan.floor + (plan.peak - plan.floor) * share


def weight_decay(samples: int, plan: OptimizerPlan, train_samples: int) -> float:
    """Return the weight decay after `samples` of the run's `train_samples`.

    Source: Megatron-LM's `--weight-decay-incr-style`.
    """
    start, end = plan.weight_decay, plan.end_weight_decay
    if plan.weight_decay_style == "constant":
        return start
    if samples > train_samples:
        return end
    return start + (end - start) * (1 - _FALLS[plan.weight_decay_style](samples / train_samples))


_FALLS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "exponential": lambda progress: 2 * 0.5**progress - 1,
    "minus_sqrt": lambda progress: 1 - math.sqrt(progress),
}
"""What is left of a value, 1 at progress 0 and 0 at progress 1, by style."""
