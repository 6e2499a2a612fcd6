"""Learning-rate and weight-decay schedules, stateless functions of consumed samples and tokens."""

import math
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any

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
    rate: float = SCHEDULES.get(plan.style, plan.own_flags)(consumed, plan)
    return rate


def linear(progress: float) -> float:
    """Return the linear decay factor: 1 at progress 0, 0 at progress 1."""
    return 1 - progress


def cosine(progress: float) -> float:
    """Return the cosine decay factor: 1 at progress 0, 0 at progress 1."""
    return 0.5 * (1 + math.cos(math.pi * progress))


_FALLS: Mapping[str, Callable[[float], float]] = {
    "linear": linear,
    "cosine": cosine,
    "exponential": lambda progress: 2 * 0.5**progress - 1,
    "minus_sqrt": lambda progress: 1 - math.sqrt(progress),
}
"""Shapes of the annealing of WSD and of the weight decay."""


def lr_decay(share: Callable[..., float]) -> Callable[..., float]:
    """Make a schedule, for SCHEDULES, of a function of the progress; a decorator.

    The progress goes from 0 at the end of the warm-up to 1 at the end of the decay; the function
    returns the share of the way from --min-lr up to --lr.
    """

    @wraps(share)
    def rate(consumed: int, plan: SchedulePlan, **flags: Any) -> float:
        if consumed > plan.decay:
            return plan.floor
        progress = (consumed - plan.warmup) / (plan.decay - plan.warmup)
        return plan.floor + (plan.peak - plan.floor) * share(progress, **flags)

    # Of `share` the registry has to see only whether it takes flags.
    options = [
        each for each in signature(share).parameters.values() if each.kind == each.KEYWORD_ONLY
    ]
    first = [Parameter(name, Parameter.POSITIONAL_ONLY) for name in ("consumed", "plan")]
    rate.__signature__ = Signature([*first, *options])  # type: ignore[attr-defined]
    return rate


SCHEDULES.register("linear")(lr_decay(linear))
SCHEDULES.register("cosine")(lr_decay(cosine))
SCHEDULES.register("square-root")(lr_decay(lambda progress: math.sqrt(1 - progress)))


@SCHEDULES.register("constant")
def constant(consumed: int, plan: SchedulePlan) -> float:
    """Return the peak."""
    return plan.peak


@SCHEDULES.register("inverse-square-root")
def inverse_square_root(consumed: int, plan: SchedulePlan) -> float:
    """Return a rate that falls with the inverse square root of `consumed`, down to the floor."""
    if consumed > plan.decay:
        return plan.floor
    rate = plan.peak * math.sqrt(max(plan.warmup, 1) / max(consumed, 1))
    return max(plan.floor, rate)


@SCHEDULES.register("WSD")
def wsd(consumed: int, plan: SchedulePlan) -> float:
    """Return the peak until the annealing begins, then its fall to the floor."""
    if consumed > plan.decay:
        return plan.floor
    progress = max(0.0, (consumed - (plan.decay - plan.anneal)) / plan.anneal)
    share = _FALLS[plan.anneal_style](progress)
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
