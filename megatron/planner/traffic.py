"""Communication volume: bytes that a rank sends in one step, by kind of parallelism, and what hides them."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from megatron.config.architecture.attention_form import attention_form
from megatron.config.architecture.counts import table_weights
from megatron.config.parallelism.deepspeed_keys import has_bf16_optimizer
from megatron.config.parsing.json_tree import value_at
from megatron.config.plan.plan import Plan
from megatron.pipeline.stages import Stage
from megatron.planner.activations import BYTES, Activations
from megatron.planner.memory import weights_of
from megatron.planner.stages import branches_of, stages_of

_BUCKET = 5e8
_REUSE = 1e9
"""Elements: DeepSpeed's defaults of reduce_bucket_size and of stage3_max_reuse_distance."""


@dataclass(frozen=True, kw_only=True)
class Volume:
    """Bytes sent in a step, by what is computed meanwhile.

    Args:
        exposed: overlapped by nothing.
        forward: overlapped by forward passes.
        backward: overlapped by backward passes.
    """

    exposed: float = 0.0
    forward: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return sum(astuple(self))

    def __add__(self, other: "Volume") -> "Volume":
        return Volume(
            exposed=self.exposed + other.exposed,
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
        )


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes sent by a rank in a step.

    Rings send (n - 1) / n of a tensor per pass; what goes to one rank, such as a bucket of gradients
    to its owner, passes each link once.

    Args:
        data: gradients overlapped by backward passes, weights by forward passes.
        data_passes: micro-batches whose passes hide `data`.
        experts: tokens to their experts and back, where an even share goes to each expert.
    """

    tensor: Volume
    pipeline: Volume
    data: Volume
    data_passes: int
    sequence: Volume
    experts: Volume


def traffic_of(plan: Plan, number: int) -> Traffic:
    """Return the traffic of the busiest rank in a step of `number` micro-batches, at 0 what every step has."""
    stages = stages_of(plan)
    found = [stage_traffic(plan, stages, index, number) for index in range(len(stages))]

    def most(name: str) -> Volume:
        volumes: list[Volume] = [getattr(each, name) for each in found]
        return max(volumes, key=lambda volume: volume.total)

    kinds = ("tensor", "pipeline", "data", "sequence", "experts")
    return Traffic(data_passes=found[0].data_passes, **{name: most(name) for name in kinds})


def stage_traffic(plan: Plan, stages: Sequence[Stage], index: int, number: int) -> Traffic:
    """Return the traffic of a rank of one of the `stages` of `plan`."""
    parallel, spec, stage = plan.parallel, plan.model, stages[index]
    activations = Activations(plan, "cuda")
    width = BYTES[plan.precision.dtype]
    full = activations.tokens * spec.hidden_size * width
    passes = 2 + plan.recompute.share
    exchanged = activations.tokens * width * spec.attention.head_dim / parallel.tensor
    layers = branches_of(spec, stage).attention
    if parallel.ring:
        # Keys and values forward; backward they and their gradients.
        heads = 2 * spec.attention.num_query_groups
        around = number * layers * exchanged * heads * (parallel.sequence - 1)
        again = passes - 1 + (plan.recompute.granularity == "selective")
        sequence = Volume(forward=around * again, backward=2 * around)
    else:
        heads = spec.attention.num_attention_heads + spec.attention.num_query_groups
        widths = 1 + spec.value_dim / spec.attention.head_dim
        exposed = number * layers * passes * heads * widths * exchanged * _ring(parallel.sequence)
        sequence = Volume(exposed=exposed)
    # Tensor-parallel ranks send a part each; in schedules of our own only if the sequence is divided.
    whole = parallel.has_own_schedule and not parallel.sequence_parallel
    parts = 1 if whole else parallel.tensor
    return Traffic(
        tensor=_tensor(plan, stage, number),
        pipeline=Volume(
            exposed=number * _messages(plan, stage) * full / parts
            + _tied_bytes(plan, stages, index)
        ),
        data=_data(plan, stage, number),
        data_passes=number if parallel.zero_stage > 1 else 1,
        sequence=sequence,
        experts=_tokens_of_experts(plan, stage, number),
    )


def _messages(plan: Plan, stage: Stage) -> int:
    """Return the tensors that a stage sends in a micro-batch: activations and gradients of each chunk.

    The last chunk of the network sends no activations, the first one no gradients.
    """
    if plan.parallel.pipeline == 1:
        return 0
    ends = (stage.index == 0) + (stage.index == plan.parallel.pipeline - 1)
    return 2 * plan.parallel.chunks - ends


def _tied_bytes(plan: Plan, stages: Sequence[Stage], index: int) -> float:
    """Return the bytes of a step for a table that is tied across stages.

    Its gradients are summed over these, and the first one sends its weights to the others. Where each
    weight of theirs is a bucket, a rank has its part of the sum, and copies stay equal by themselves.
    """
    table = _tied_elements(plan, stages[index])
    if not table:
        return 0.0
    holders = [each.index for each in stages if _tied_elements(plan, each)]
    if len(holders) == 1:
        return 0.0
    precision, parallel = plan.precision, plan.parallel
    gradient = 2 * _ring(len(holders)) * (4 if precision.fp32_gradients else 2)
    if parallel.bucket_size:
        return table * gradient / (parallel.data * parallel.sequence)
    weight = BYTES[precision.dtype] if index == holders[0] else 0
    return table * (gradient + weight)


def _tensor(plan: Plan, stage: Stage, number: int) -> Volume:
    """Return the tensor-parallel traffic of the layers, the embedding and the head, without the loss.

    A branch has an all-reduce a pass, as much as two passes around the ring; where the ranks divide
    the sequence, a reduction and a gathering in its place, and a gathering more in backward. In
    backward, those of column-parallel layers overlap with their products.
    """
    parallel, spec = plan.parallel, plan.model
    full = Activations(plan, "cuda").tokens * spec.hidden_size * BYTES[plan.precision.dtype]
    divides = parallel.sequence_parallel
    branches, again, depths = branches_of(spec, stage), plan.recompute.share, stage.depths
    # In front of attention as many features of a token as its latents have, elsewhere all.
    received = (
        branches.others + branches.attention * attention_form(spec).received / spec.hidden_size
    )
    beside = 2 * received
    forward = branches.total + (received if divides else branches.total)
    rings = forward * (1 + again) + (received if divides else 0)
    # Each depth of prediction has an embedding of its own.
    rings += 2 * (stage.has_embedding + depths)
    if stage.has("logits"):
        # The gradient of its input, and with a divided sequence both gatherings of that.
        rings += (1 if divides else 0) * (1 + depths)
        beside += 2 * (1 + depths)
    once = number * full * _ring(parallel.tensor)
    exposed = once * rings
    attention = spec.attention
    if attention.num_query_groups < parallel.tensor:
        # Projections are gathered, as a rank has not all features of its query group.
        features = attention.query_features + 2 * attention.key_features
        exposed += once * branches.attention * (2 + again) * features / spec.hidden_size
    if spec.norm.qk_norm_across_heads:
        # Two sums of squares in 32 bits for each token, forward and backward.
        tokens = Activations(plan, "cuda").tokens
        sums = 2 * branches.attention * (2 + again)
        exposed += number * _ring(parallel.tensor) * 2 * 4 * tokens * sums
    if parallel.divides_experts:
        # Behind the exchange the rows of experts are gathered; with a divided sequence in place of the
        # tokens of an MLP.
        rows, ranks = _rows_of_experts(plan, stage), parallel.ranks_per_expert
        exposed += number * rows * (ranks - 1) / parallel.tensor
        if divides:
            mixtures = sum(spec.experts_of(layer) > 1 for layer in stage.layers)
            exposed -= once * 2 * (2 + again) * mixtures
    return Volume(exposed=exposed, backward=once * beside)


def _tokens_of_experts(plan: Plan, stage: Stage, number: int) -> Volume:
    """Return the all-to-alls of tokens: to the experts and back, forward and backward.

    Tensor-parallel ranks each send their part.
    """
    parallel = plan.parallel
    rows = _rows_of_experts(plan, stage) / parallel.tensor
    return Volume(exposed=number * rows * _ring(parallel.expert))


def _rows_of_experts(plan: Plan, stage: Stage) -> float:
    """Return the bytes of tokens to their experts and back, in the passes of a micro-batch."""
    spec, activations = plan.model, Activations(plan, "cuda")
    mixtures = sum(spec.experts_of(layer) > 1 for layer in stage.layers)
    rows = activations.tokens * activations.choices
    once = rows * spec.hidden_size * BYTES[plan.precision.dtype]
    return mixtures * 2 * (2 + plan.recompute.share) * once


def _data(plan: Plan, stage: Stage, number: int) -> Volume:
    """Return the data-parallel traffic: reduction of gradients, and gathering of divided weights."""
    held, copies = weights_of(plan, stage), plan.parallel.data * plan.parallel.sequence
    moved = stage.trained if plan.parallel.zero_stage < 3 else held
    all_alike = _Copied(moved.dense, copies, min(moved.dense, _tied_elements(plan, stage)))
    experts = _Copied(moved.experts, plan.parallel.copies_of_experts)
    volumes = [
        _copies_volume(plan, each, number, held=held.total)
        for each in (all_alike, experts)
        if each.count and each.copies > 1
    ]
    return sum(volumes, Volume())


@dataclass(frozen=True)
class _Copied:
    """`count` weights that `copies` ranks have, `shared` of them in a tied table."""

    count: int
    copies: int
    shared: int = 0


def _copies_volume(plan: Plan, weights: _Copied, number: int, *, held: int) -> Volume:
    """Return the traffic of weights that are equal on several ranks; the rank has `held` in all."""
    parallel, precision = plan.parallel, plan.precision
    count, ring = weights.count, _ring(weights.copies)
    weight = count * BYTES[precision.dtype]
    gradient = count * (4 if precision.fp32_gradients else 2)
    if parallel.zero_stage == 3:
        # What the backward pass needs soon after the forward pass stays until then.
        near = value_at(plan.deepspeed, "zero_optimization.stage3_max_reuse_distance", _REUSE) / 2
        again = max(0.0, 1 - near / held)
        every = number * ring
        return Volume(forward=every * weight, backward=every * (gradient + again * weight))
    if parallel.bucket_size:
        # The bucket of the first layers, which backward completes last and forward needs first. Muon's
        # matrices are one bucket.
        size = count if plan.optimizer.name == "muon" else parallel.bucket_size
        at_end = min(1.0, (size + weights.shared) / count)
        at_start = min(1.0, size / count)
        return Volume(
            exposed=ring * (at_end * gradient + at_start * weight),
            forward=ring * (1 - at_start) * weight,
            backward=ring * (1 - at_end) * gradient,
        )
    if parallel.zero_stage == 0 or has_bf16_optimizer(plan.deepspeed):
        gathered = ring * weight if parallel.zero_stage else 0.0
        return Volume(exposed=2 * ring * gradient + gathered)
    return _deepspeed_volume(plan, weights, number, weight=weight, gradient=gradient)


def _deepspeed_volume(
    plan: Plan, weights: _Copied, number: int, *, weight: float, gradient: float
) -> Volume:
    """Return the traffic of DeepSpeed's optimizer of ZeRO 1 and 2, which reduces in its hooks."""
    parallel, zero = plan.parallel, plan.deepspeed["zero_optimization"]
    ring = _ring(weights.copies)
    once = gradient * (number if parallel.zero_stage == 2 else 1)
    if value_at(zero, "use_multi_rank_bucket_allreduce", True):
        once *= 2 * ring
    if parallel.pipeline > 1 or not value_at(zero, "overlap_comm", False):
        return Volume(exposed=ring * weight + once)
    # The bucket of the first layers, which backward completes last.
    late = float(value_at(zero, "reduce_bucket_size", _BUCKET)) + weights.shared
    at_end = min(1.0, late / weights.count)
    # At stage 2 the end of one backward pass is followed by the next forward pass.
    at_end /= number if parallel.zero_stage == 2 and number else 1
    return Volume(exposed=ring * weight + at_end * once, backward=(1 - at_end) * once)


def _tied_elements(plan: Plan, stage: Stage) -> int:
    """Return the elements of a tied table: complete at the end of a step alone."""
    spec, parallel = plan.model, plan.parallel
    is_shared = stage.has_embedding or (stage.has_head and parallel.pipeline > 1)
    if not is_shared or not spec.shares_embedding or spec.head:
        return 0
    return table_weights(spec, tensor=parallel.tensor)


def _ring(ranks: int) -> float:
    return (ranks - 1) / ranks
