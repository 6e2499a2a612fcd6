"""Communication volume: bytes that a rank sends in one step, by kind of parallelism."""

from dataclasses import dataclass

from megatron.config.plan import Plan
from megatron.planner.activations import BYTES, Activations
from megatron.planner.memory import weights_of
from megatron.planner.pipeline_stages import Stage, stages_of


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes sent by the busiest rank in a step; rings send (n - 1) / n of a tensor per pass."""

    tensor: float
    pipeline: float
    data: float
    sequence: float


def traffic_of(plan: Plan, number: int) -> Traffic:
    """Return the traffic of a step of `number` micro-batches, at 0 what every step has."""
    parallel, spec = plan.parallel, plan.model
    stages = stages_of(plan)
    activations = Activations(plan, "cuda")
    width = BYTES[plan.precision.dtype]
    full = activations.tokens * spec.hidden_size * width
    layers = max(len(stage.layers) for stage in stages)
    passes = 2 + plan.recompute.share
    # Two all-reduces a pass, each as much as two passes around the ring; where the ranks divide the
    # sequence, a reduction and a gathering in their place, and two gatherings more in backward.
    rings = 4 * passes + (2 if parallel.sequence_parallel else 0)
    tensor = number * layers * full * _ring(parallel.tensor) * rings
    # A chunk sends activations and gradients; the first and the last of the network one of them.
    messages = (0, 0, 2 * parallel.chunks - 1, 2 * parallel.chunks)[min(3, parallel.pipeline)]
    # Tensor-parallel ranks send a part each; with chunks only if the sequence is divided.
    whole = parallel.chunks > 1 and not parallel.sequence_parallel
    pipeline = messages * number * full / (1 if whole else parallel.tensor)
    exchanged = activations.tokens * width * spec.head_dim / parallel.tensor
    exchanged *= 2 * spec.num_attention_heads + 2 * spec.num_query_groups
    return Traffic(
        tensor=tensor,
        pipeline=pipeline,
        data=max(_data(plan, stage, number) for stage in stages),
        sequence=number * layers * passes * exchanged * _ring(parallel.sequence),
    )


def _data(plan: Plan, stage: Stage, number: int) -> float:
    """Return the data-parallel traffic: reduction of gradients, and gathering of divided weights."""
    parallel = plan.parallel
    count, stage_of_zero = weights_of(plan, stage).dense, parallel.zero_stage
    weight = count * BYTES[plan.precision.dtype]
    gradient = count * (4 if plan.precision.fp32_gradients else 2)
    ring = _ring(parallel.data * parallel.sequence)
    match stage_of_zero:
        case 0:
            return 2 * ring * gradient
        case 1:
            return ring * (2 * gradient + weight)
        case 2:
            return ring * (number * gradient + weight)
    fetched = 2 + plan.recompute.share
    return ring * number * (gradient + fetched * weight)


def _ring(ranks: int) -> float:
    return (ranks - 1) / ranks
