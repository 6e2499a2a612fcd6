"""Roofline of a rank: time of a micro-batch by matrix products, attention, memory traffic, launches.

Operations and bytes of this code are counted; the rates are shares of the data sheet, chosen once for
each generation of GPUs and compared with published runs of other programs
(tests/golden/published_runs.md). No run of this program has confirmed them. Large micro-batches are
faster for three reasons: a product of few rows reads its operands for fewer operations, every
micro-batch adds the gradients of all weights, and it takes at least as long as the host needs to
launch it.
"""

from dataclasses import dataclass

from megatron.config.architecture.architecture import network_of
from megatron.config.architecture.attention_form import attention_form
from megatron.config.architecture.counts import core_features
from megatron.config.network.model_spec import ModelSpec
from megatron.config.plan.plan import Plan
from megatron.planner.activations import BYTES, Activations
from megatron.planner.devices import Device
from megatron.planner.memory import weights_of
from megatron.planner.stages import branches_of, stages_of

ATTENTION_SHARES = (0.566, 0.404)
"""Of the peak, that fused attention reaches forward and backward at 128 features of a head."""
MASKED_SHARE = 0.6
"""Of that, with a mask that is read from memory and whose zeros are not skipped."""
MEMORY_SHARE = 0.836
"""Of the memory bandwidth, that operations which only read and write reach."""
LAYER_PASSES = {False: (25.2, 5), True: (27.5, 8)}
"""Passes over [s, b, h], reads and writes of forward and backward, by whether the MLP is gated: those
of a layer except its MLP's activations, and those over one more hidden size of ffn_hidden_size. For
an MLP four times as wide they are 45.2 and 59.5: 2 and 1 more than tests/golden/traffic.txt counts,
because with dropout the last addition of a layer is a pass of its own."""
SCORE_PASSES = 12
"""Passes over the scores of attention where they are written out."""
LOGIT_BYTES = 8
"""Read and written for each logit, by the head's result, its loss and its gradient."""
GRADIENT_BYTES = {True: (10, 10), False: (0, 12)}
"""Read and written for each weight to add its gradient in the first micro-batch of a step and in
another one, by whether weights have 16 bits."""
STEP_BYTES = {True: (8, 44), False: (12, 28)}
"""The same for each weight in the optimizer's step: norm, clipping and zeroing; its update, which
ZeRO divides."""
PARAMETER_S = 16.5e-6
"""To launch the operations on one parameter in a step."""
LAUNCHES = (48, 40)
"""Operations of a layer, forward and backward, and outside of layers, in a micro-batch."""
LAUNCH_S = 10e-6
"""For the host to launch one of them."""
TAIL_S = 4.5e-3
"""Of a step in which the GPU waits: for the norm, the loss and the first layers to be launched."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of one rank: of a micro-batch, but for `step`, which every step takes besides."""

    products: float
    attention: float
    pointwise: float
    logits: float
    gradients: float
    launches: float
    step: float

    @property
    def micro_batch(self) -> float:
        """Time of a micro-batch on the device, at least that of the host."""
        busy = self.products + self.attention + self.pointwise + self.logits + self.gradients
        return max(busy, self.launches)


def times_of(plan: Plan, device: Device, flops: float) -> Times:
    """Return the times of a rank of an average pipeline stage, without communication.

    Args:
        flops: of a micro-batch on the rank, recomputation included.
    """
    spec, parallel = plan.model, plan.parallel
    memory = 1e9 * device.memory_gb_s * MEMORY_SHARE
    activations = Activations(plan, "cuda")
    is_mixed = BYTES[plan.precision.dtype] == 2
    layers = _num_layers(plan) / parallel.pipeline
    forwards = 1 + plan.recompute.share / 3  # of the passes of a layer, with those recomputed
    core = _attention_flops(spec) * plan.batch.micro_batch_size
    core /= parallel.tensor * parallel.sequence * parallel.pipeline
    rate, operand = _product_rate(plan, device)
    again = plan.recompute.share + (plan.recompute.granularity == "selective")
    beside, mlp_passes = LAYER_PASSES[spec.mlp.is_gated]
    passed = float(activations.outside * beside * spec.hidden_size)
    passed += activations.tokens * mlp_passes * spec.mlp.ffn_hidden_size / parallel.tensor
    logits = (
        activations.tokens * spec.vocabulary.padded_vocab_size / parallel.tensor / parallel.pipeline
    ) * spec.scores_per_token
    weights = max(weights_of(plan, stage).total for stage in stages_of(plan))
    first, further = GRADIENT_BYTES[is_mixed]
    on_all, divided = STEP_BYTES[is_mixed]
    copies = parallel.data * parallel.sequence if parallel.zero_stage else 1
    return Times(
        products=(flops - (3 + again) * core) * _slowdown(plan, operand) / rate,
        attention=_attention_s(plan, core, again, device),
        pointwise=layers * passed * BYTES[plan.precision.dtype] * forwards / memory,
        logits=LOGIT_BYTES * logits / memory,
        gradients=weights * further / memory,
        launches=(LAUNCHES[0] * layers * forwards + LAUNCHES[1]) * LAUNCH_S,
        step=weights * (on_all + divided / copies + first - further) / memory
        + (12 * layers + 4) * PARAMETER_S
        + TAIL_S,
    )


def column_share(spec: ModelSpec) -> float:
    """Return the share of column-parallel layers in the products of a layer."""
    products = attention_form(spec).products
    inner = spec.hidden_size * spec.mlp.inner_features
    narrowing = spec.hidden_size * spec.mlp.ffn_hidden_size
    columns = sum(each.matrix for each in products if each.divided == "columns")
    return (columns + inner) / (sum(each.matrix for each in products) + inner + narrowing)


def work_of_stages(plan: Plan) -> list[float]:
    """Return what each pipeline stage computes, relative to their mean.

    The head is as much as its products.
    """
    spec = plan.model
    layer = sum(inputs * outputs for inputs, outputs in _layer_shapes(plan))
    head = spec.hidden_size * spec.vocabulary.padded_vocab_size / plan.parallel.tensor / layer
    work = [
        branches_of(spec, each).total / 2 + head * each.has("logits") * (1 + each.depths)
        for each in stages_of(plan)
    ]
    return [each * len(work) / sum(work) for each in work]


def _product_rate(plan: Plan, device: Device) -> tuple[float, float]:
    """Return the operations a second of large products, and those in the time of reading two elements.

    With the latter a product takes 1 + that * (1/rows + 1/inputs + 1/outputs) times as long: operands
    and result are read and written besides the operations.
    """
    rate = device.peak_flops(plan.precision.dtype) * device.product_share
    memory = 1e9 * device.memory_gb_s * MEMORY_SHARE
    return rate, rate * BYTES[plan.precision.dtype] / 2 / memory


def _slowdown(plan: Plan, operand: float) -> float:
    """Return the mean factor by which operands lengthen products: see `_product_rate`."""
    spec, rows = plan.model, Activations(plan, "cuda").tokens
    layers = _num_layers(plan)
    shapes = [(layers, *sizes) for sizes in _layer_shapes(plan)]
    vocabulary = spec.vocabulary.padded_vocab_size / plan.parallel.tensor
    shapes.append((spec.scores_per_token, spec.hidden_size, vocabulary))
    total = longer = 0.0
    for count, inputs, outputs in shapes:
        operations = count * inputs * outputs
        total += operations
        longer += operations * (1 + operand * (1 / rows + 1 / inputs + 1 / outputs))
    return longer / total


def _layer_shapes(plan: Plan) -> list[tuple[float, float]]:
    """Return inputs and outputs of a layer's products on a rank, without attention's cores."""
    spec, tensor = plan.model, plan.parallel.tensor
    width = spec.hidden_size
    return [
        *(product.shape(tensor) for product in attention_form(spec).products),
        (width, spec.mlp.inner_features / tensor),
        (spec.mlp.ffn_hidden_size / tensor, width),
    ]


def _attention_flops(spec: ModelSpec) -> float:
    """Return the operations of a forward pass of attention's cores on a sample, masked ones too."""
    return 2.0 * core_features(spec) * network_of(spec).attended_pairs(spec)


def _num_layers(plan: Plan) -> float:
    """Return the number of transformer layers, of two branches, that a token passes in all stages."""
    return sum(branches_of(plan.model, stage).total for stage in stages_of(plan)) / 2


def _attention_s(plan: Plan, core: float, again: float, device: Device) -> float:
    """Return the time of attention's cores in a micro-batch.

    Args:
        core: operations of their forward pass.
        again: forward passes that are recomputed.
    """
    spec, parallel = plan.model, plan.parallel
    peak = device.peak_flops(plan.precision.dtype)
    if plan.kernels.attention in ("sdpa", "flash"):
        head_dim = spec.attention.head_dim
        padded = -(-head_dim // 32) * 32
        shape = min(1.0, 0.6 + 0.4 * head_dim / 128) * head_dim / padded
        is_masked = spec.positions.position_embedding == "alibi" or spec.attention.window > 0
        share = shape * (MASKED_SHARE if is_masked else 1.0)
        is_causal = network_of(spec).is_causal and not is_masked
        counted = core / 2 if is_causal else core
        forward, backward = (peak * each * share for each in ATTENTION_SHARES)
        return counted * ((1 + again) / forward + 2.5 / backward)
    memory = 1e9 * device.memory_gb_s * MEMORY_SHARE
    rate, operand = _product_rate(plan, device)
    slowdown = 1 + operand * (1 / spec.attention.head_dim + 2 / spec.seq_length)
    layers = (
        sum(branches_of(spec, stage).attention for stage in stages_of(plan)) / parallel.pipeline
    )
    heads = spec.attention.num_attention_heads / parallel.tensor / parallel.sequence
    scores = plan.batch.micro_batch_size * heads * spec.seq_length**2 * layers
    wide = 4 if plan.kernels.attention == "reference" else BYTES[plan.precision.dtype]
    products = (3 + again) * core * slowdown / rate
    return products + SCORE_PASSES * wide * scores / memory
