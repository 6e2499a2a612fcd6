"""Memory of one rank of each pipeline stage: weights, gradients, optimizer state, activations."""

from dataclasses import dataclass, replace

from megatron.config.architecture.architecture import network_of
from megatron.config.architecture.attention_form import attention_form
from megatron.config.architecture.counts import Weights, table_weights
from megatron.config.parallelism.deepspeed_keys import has_bf16_optimizer
from megatron.config.parsing.json_tree import value_at
from megatron.config.plan.plan import Plan
from megatron.pipeline.schedule import Grid
from megatron.pipeline.stages import Stage
from megatron.planner.activations import BYTES, Activations
from megatron.planner.stages import stages_of

_MASTER = 4
_BUCKET = 5e8
_PERSISTENT = 1e5
"""Elements: DeepSpeed's defaults of reduce_bucket_size and stage3_param_persistence_threshold."""

_IN_TRANSIT = 4
"""Messages that a rank sends or receives ahead, where pipeline transfers overlap with passes."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one rank of a stage, at the fullest moment of a step."""

    weights: int
    gradients: int
    optimizer: int  # 32-bit weights and moments
    buffers: int  # what ZeRO collects gradients in
    activations: int  # of all micro-batches under way
    logits: int  # or what the loss keeps instead; and what a pipeline's last stage also holds
    transient: int  # what a moment of the backward pass, or of evaluation, takes on top of that
    host: int  # offloaded

    @property
    def kept(self) -> int:
        """All that lies on the device when the last forward pass of a step ends."""
        return self.total - self.transient

    @property
    def total(self) -> int:
        """Most on the device at any time."""
        state = self.weights + self.gradients + self.optimizer
        return state + self.buffers + self.activations + self.logits + self.transient


def memory_of_stages(plan: Plan, *, device: str = "cuda") -> list[Memory]:
    """Return the memory of one rank of every stage; tensor-parallel ranks and replicas are alike.

    Args:
        device: "cuda" or "cpu", where buffers count as far as they are written to.
    """
    return [_memory(plan, stage, device) for stage in stages_of(plan)]


def _memory(plan: Plan, stage: Stage, device: str) -> Memory:
    held, layers = stage.weights, [entry.weights for entry in stage.blocks]
    sizes = _Sizes(plan)
    activations = Activations(plan, device)
    parts = [*zip(_under_way(plan, stage), stage.parts, strict=True)]
    inputs = sum(number * _group_inputs(plan, part, activations) for number, part in parts)
    stays = not value_at(plan.deepspeed, "activation_checkpointing.cpu_checkpointing", False)
    logits = activations.logits() if stage.has_head else 0
    loss = activations.loss() if stage.has_head else 0
    again = [
        sum(activations.entry(part.blocks[i]) for i in group)
        for part in stage.parts
        for group in plan.recompute.groups(len(part.blocks))
    ]
    # Divided weights: the layer at work and the one that is fetched meanwhile.
    divided = 2 * max((w.total for w in layers), default=0) * sizes.weight
    gathered = divided if plan.parallel.zero_stage == 3 else 0
    kept = (
        sum(number * _activations(plan, part, activations) for number, part in parts)
        + (inputs if stays else 0)
        + _put_off(plan, stage, activations)
        + (_IN_TRANSIT * activations.stream if plan.parallel.has_own_schedule else 0)
    )
    logits += _pipeline_leftover_bytes(plan, stage, activations)
    evaluated = _evaluation_bytes(plan, stage, device) - kept - logits
    return Memory(
        weights=sizes.weight_bytes(held) + sizes.persistent(plan, stage),
        gradients=sizes.gradient_bytes(stage.trained),
        optimizer=0 if sizes.optimizer_on_host else sizes.optimizer_bytes(stage.trained),
        buffers=sizes.buckets(stage.trained, device),
        activations=kept,
        logits=logits,
        transient=max([*again, loss, evaluated]) + gathered,
        host=sizes.host_bytes(held, stage.trained) + (0 if stays else inputs),
    )


def _evaluation_bytes(plan: Plan, stage: Stage, device: str) -> int:
    """Return the activations and logits of an evaluation with larger micro-batches than training's.

    Nothing is kept for a backward pass: the most is that of one layer or of the loss.
    """
    evaluation = plan.evaluation
    if not evaluation.iters or evaluation.batch.micro_batch_size <= plan.batch.micro_batch_size:
        return 0
    plan = replace(plan, batch=evaluation.batch)
    forward = Activations(plan, device)
    moments = [*map(forward.entry, stage.entries)]
    if stage.has_head:
        moments.append(forward.loss() + (0 if forward.defers_logits else forward.logits()))
    return forward.stream + max(moments, default=0) + _pipeline_leftover_bytes(plan, stage, forward)


def _put_off(plan: Plan, stage: Stage, activations: Activations) -> int:
    """Return what the weight passes still need that a zero-bubble schedule has put off."""
    heaviest = max(sum(map(activations.deferred_bytes, part.blocks)) for part in stage.parts)
    return schedule_of(plan).passes_put_off(stage.index) * heaviest


def micro_batches_under_way(plan: Plan, stage: Stage) -> float:
    """Return the most micro-batches in flight: those that wait for their backward pass.

    With chunks, those of each chunk count as a part.

    Source: one forward, one backward (1F1B), arXiv:2104.04473, section 2.2: as many as there are
        stages from this one to the last.
    """
    return sum(_under_way(plan, stage)) / plan.parallel.chunks


def _under_way(plan: Plan, stage: Stage) -> list[int]:
    """Return the micro-batches in flight in each chunk of a stage, at the fullest moment."""
    return schedule_of(plan).most_in_flight(stage.index)


def schedule_of(plan: Plan) -> Grid:
    """Return the pipeline schedule of a step of the full batch."""
    return Grid(
        ranks=plan.parallel.pipeline,
        chunks=plan.parallel.chunks,
        micro_batches=max(1, plan.batch.num_micro_batches(plan.batch.global_batch_size)),
        splits_backward=plan.parallel.splits_backward,
    )


def weights_of(plan: Plan, stage: Stage) -> Weights:
    """Return the numbers of weights of one rank of `stage`; a tied table is on both of its stages."""
    return stage.weights


def _activations(plan: Plan, stage: Stage, activations: Activations) -> int:
    """Return the activations of a micro-batch on a stage or chunk, without inputs of recomputed layers."""
    blocks = stage.blocks
    again = {blocks[i].number for group in plan.recompute.groups(len(blocks)) for i in group}
    recomputed = [entry for entry in blocks if entry.number in again]
    kept = sum(activations.entry(entry) for entry in stage.entries if entry not in recomputed)
    kept += _masks(plan, stage, activations)
    # The pipeline holds what it has sent until it is needed no more.
    return kept + (0 if stage.has_head else activations.stream)


def _masks(plan: Plan, stage: Stage, activations: Activations) -> int:
    return network_of(plan.model).kept_masks(stage.layers, activations)


def _pipeline_leftover_bytes(plan: Plan, stage: Stage, activations: Activations) -> int:
    """Return the memory that DeepSpeed's pipeline holds of finished micro-batches on the last stage.

    Both of its buffers keep inputs and outputs until others take their place. Outputs keep what
    recomputation began with: the inputs of its layers, and masks.
    """
    if plan.parallel.pipeline == 1 or plan.parallel.has_own_schedule or not stage.has_head:
        return 0
    recomputed = 0
    if plan.recompute.groups(len(stage.layers)):
        recomputed = 2 * _masks(plan, stage, activations)
        if not value_at(plan.deepspeed, "activation_checkpointing.cpu_checkpointing", False):
            recomputed += 2 * _group_inputs(plan, stage, activations)
    if activations.defers_logits:
        return 2 * activations.head_input() + 2 * activations.stream + recomputed
    logits = activations.logits()
    uncast = activations.uncast_logits(logits)
    return 2 * logits + uncast + 2 * activations.stream + recomputed


def _group_inputs(plan: Plan, stage: Stage, activations: Activations) -> int:
    divides = value_at(plan.deepspeed, "activation_checkpointing.partition_activations", False)
    count = len(plan.recompute.groups(len(stage.layers)))
    return count * activations.stream // (plan.parallel.tensor if divides else 1)


class _Sizes:
    """Bytes per weight of master weights, gradients and optimizer states, as in DeepSpeed's optimizers.

    Undivided: torch's optimizer and 32-bit weights. bf16 at stage 1: a full 32-bit gradient on
    every replica and an optimizer divided over them. Others: from stage 2 on gradients are divided
    too, at stage 3 weights.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self.weight = BYTES[plan.precision.dtype]
        self.stage = plan.parallel.zero_stage
        self.optimizer_on_host = plan.optimizer.on_cpu
        zero = plan.deepspeed.get("zero_optimization", {})
        self.zero = zero
        self.weights_on_host = value_at(zero, "offload_param.device", "none") != "none"
        sums = value_at(plan.deepspeed, "data_types.grad_accum_dtype")
        self.gradient = 4 if sums == "fp32" else self.weight
        self.is_bf16_optimizer = has_bf16_optimizer(plan.deepspeed)

    def weight_bytes(self, held: Weights) -> int:
        if self.stage < 3:
            return held.total * self.weight
        return 0 if self.weights_on_host else self._divide(held, self.weight)

    def persistent(self, plan: Plan, stage: Stage) -> int:
        """Return the small weights that stage 3 does not divide: norms, biases and small matrices."""
        if self.stage < 3:
            return 0
        most = value_at(self.zero, "stage3_param_persistence_threshold", _PERSISTENT)
        spec = plan.model
        width, inner, tensor = spec.hidden_size, spec.mlp.inner_features, plan.parallel.tensor
        form = attention_form(spec)
        shapes = [(each.has_bias, *each.shape(tensor)) for each in form.products]
        layer = [
            *([width] * (4 if spec.norm.normalization == "LayerNorm" else 2)),
            *([width, inner // tensor] if spec.mlp.linear_bias else []),
            *form.norms,
            *(outputs for has_bias, _, outputs in shapes if has_bias),
            *(inputs * outputs for _, inputs, outputs in shapes),
            *(size * width // tensor for size in (inner, spec.mlp.ffn_hidden_size)),
        ]
        tables = [table_weights(spec, tensor=tensor)] * (
            1 if spec.vocabulary.tied_embeddings else 2
        )
        if spec.positions.position_embedding == "learned":
            tables.append(spec.positions.max_position_embeddings * width)
        small = sum(n for n in layer if n <= most) * len(stage.layers)
        return (small + sum(n for n in tables if n <= most)) * self.weight

    def gradient_bytes(self, held: Weights) -> int:
        if not self.plan.evaluation.optimizer:
            return 0
        if self.optimizer_on_host:
            return 0
        if self.is_bf16_optimizer:
            # The sum, and the 16-bit gradients of a micro-batch unless each is freed at once.
            frees = value_at(self.plan.deepspeed, "bf16.immediate_grad_update", False)
            return held.total * (self.gradient + (0 if frees else self.weight))
        return held.total * self.gradient if self.stage < 2 else self._divide(held, self.gradient)

    def optimizer_bytes(self, held: Weights) -> int:
        if not self.plan.evaluation.optimizer:
            return 0
        has_masters = self.plan.precision.is_mixed or self.stage > 0
        each = self.plan.optimizer.state_bytes + (_MASTER if has_masters else 0)
        return held.total * each if self.stage == 0 else self._divide(held, each)

    def buckets(self, held: Weights, device: str) -> int:
        """Return the buffers that gradients are collected in on their way to other replicas.

        DeepSpeed allocates them in full. On CPUs, what is never written to takes no memory.
        """
        if self.stage == 0 or self.is_bf16_optimizer or not self.plan.evaluation.optimizer:
            return 0
        if not value_at(self.zero, "contiguous_gradients", True):
            return 0
        overlaps = value_at(self.zero, "overlap_comm", False) and self.stage < 3
        size = int(value_at(self.zero, "reduce_bucket_size", _BUCKET)) * (2 if overlaps else 1)
        return (size if device == "cuda" else min(size, held.total)) * self.weight

    def host_bytes(self, held: Weights, trained: Weights) -> int:
        """Return the offloaded part."""
        gradients = self._divide(trained, 4)
        kept = self.optimizer_bytes(trained) + gradients if self.optimizer_on_host else 0
        return kept + (self._divide(held, self.weight) if self.weights_on_host else 0)

    def _divide(self, held: Weights, each: int) -> int:
        parallel = self.plan.parallel
        # Ranks that divide a sample hold the same weights, as replicas do.
        copies = parallel.data * parallel.sequence
        experts = -(-held.experts * each // parallel.copies_of_experts)
        return -(-held.dense * each // copies) + experts


def checkpoint_bytes(plan: Plan) -> int:
    """Return the bytes of all weights and, where it is saved, of the optimizer, at least."""
    each = BYTES[plan.precision.dtype]
    if plan.checkpoint.saves_optimizer:
        has_masters = plan.precision.is_mixed or plan.parallel.zero_stage > 0
        each += plan.optimizer.state_bytes + 4 * has_masters
    return plan.model.num_parameters * each
