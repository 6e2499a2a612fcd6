"""Throughput: time of a step, MFU, and cost of a run."""

from dataclasses import dataclass

from megatron.config.architecture.architecture import network_of
from megatron.config.architecture.counts import core_features, visible_keys
from megatron.config.parallelism.recompute_plan import NOTHING
from megatron.config.plan.plan import Plan
from megatron.planner.devices import Device
from megatron.planner.memory import schedule_of
from megatron.planner.roofline import column_share, times_of, work_of_stages
from megatron.planner.traffic import Traffic, Volume, traffic_of

NODE_SHARE, NETWORK_SHARE = 0.7, 0.9
"""Of the bandwidths of data sheets, that collectives reach inside of a node and between nodes."""
CONTENTION = 0.15
"""Of the time of overlapped communication, by which it lengthens what it overlaps with: its kernels
occupy about 20 of 132 multiprocessors."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One step of the full batch, and the full run. Times are in seconds."""

    model_flops: float  # of all ranks, without recomputation
    hardware_flops: float  # with it
    bubble: float  # share of a step in which a stage waits for others
    traffic: Traffic
    step_s: float
    mfu: float  # model FLOPs against the peak of all devices, attention in full
    causal_mfu: float  # the same without the pairs that a causal mask excludes
    tokens_per_second: float
    run_s: float
    gpu_hours: float


def bubble_of(plan: Plan) -> float:
    """Return the share of a step that a pipeline stage is idle: b / (m + b) for b = (p - 1) / v.

    With a zero-bubble schedule b is a third of that.

    Source: arXiv:2104.04473, sections 2.2.1 and 2.2.2, which state it relative to the busy time;
        arXiv:2401.10241, section 2.
    """
    return schedule_of(plan).bubble


def idle_of_stages(plan: Plan) -> list[float]:
    """Return the share of a step in which each pipeline stage waits: the bubble, and for busier stages."""
    schedule, work = schedule_of(plan), work_of_stages(plan)
    step = schedule.micro_batches * max(work) + schedule.idle
    return [1 - schedule.micro_batches * each / step for each in work]


def step_flops(plan: Plan, *, recomputed: bool) -> float:
    """Return the floating-point operations of a step of the full batch; see flops_per_sample.

    Args:
        recomputed: whether what is computed again counts as well.
    """
    again = plan.recompute if recomputed else NOTHING
    return plan.batch.global_batch_size * plan.model.flops_per_sample(recompute=again)


def _masked_flops(plan: Plan) -> float:
    """Return the operations of a step on pairs of a query and a later key; 0 if they are not masked."""
    spec, network = plan.model, network_of(plan.model)
    if not network.is_causal:
        return 0.0
    pairs = sum(
        network.branches(spec, number).attention * visible_keys(spec, number) ** 2 / 2
        for number in range(1, spec.num_layers + 1)
    )
    return plan.batch.global_batch_size * 6 * core_features(spec) * pairs


def speed_of(
    plan: Plan,
    device: Device,
    *,
    gpus_per_node: int = 8,
    mfu: float | None = None,
    slowdown: float = 1.0,
) -> Speed:
    """Return the time of a step on `device`.

    Args:
        mfu: model FLOPs utilisation that is known from elsewhere; estimated when None, from the
            roofline, the bubble, and communication that nothing hides. Attention counts in full.
        slowdown: of computation relative to the roofline.
    """
    batch, world_size = plan.batch, plan.parallel.world_size
    model, hardware = (step_flops(plan, recomputed=r) for r in (False, True))
    peak = world_size * device.peak_flops(plan.precision.dtype)
    number = batch.num_micro_batches(batch.global_batch_size)
    if mfu:
        step_s, every_s = model / (peak * mfu), 0.0
    else:
        step_s, every_s = (_step_s(plan, device, n, gpus_per_node, slowdown) for n in (number, 0))
    tokens = batch.global_batch_size * plan.model.seq_length
    # A step of a smaller batch, as in a ramp, is shorter in its micro-batches alone.
    full_steps = plan.training.train_samples / batch.global_batch_size
    run_s = (step_s - every_s) * full_steps + every_s * plan.training.train_iters
    return Speed(
        model_flops=model,
        hardware_flops=hardware,
        bubble=bubble_of(plan),
        traffic=traffic_of(plan, number),
        step_s=step_s,
        mfu=model / (peak * step_s),
        causal_mfu=(model - _masked_flops(plan)) / (peak * step_s),
        tokens_per_second=tokens / step_s,
        run_s=run_s,
        gpu_hours=run_s * world_size / 3600,
    )


def _step_s(plan: Plan, device: Device, number: int, gpus_per_node: int, slowdown: float) -> float:
    """Return the time of a step of `number` micro-batches; at 0 the constant part of every step."""
    parallel, batch = plan.parallel, plan.batch
    full = batch.num_micro_batches(batch.global_batch_size)
    node = 1e9 * device.node_gb_s * NODE_SHARE
    network = 1e9 * device.network_gb_s * NETWORK_SHARE
    near = parallel.tensor * parallel.sequence <= gpus_per_node
    small = parallel.world_size <= gpus_per_node
    one, sent = traffic_of(plan, 1), traffic_of(plan, number)
    flops = step_flops(plan, recomputed=True) / parallel.world_size / full
    times = times_of(plan, device, flops)
    computed, again = slowdown * times.micro_batch, plan.recompute.share
    forward = computed / (3 + again)
    # Products with the gradients of column-parallel layers: for the weight, and after a gathering
    # for the input.
    beside = slowdown * times.products * column_share(plan.model) / (3 + again)
    beside *= 2 if parallel.sequence_parallel else 1
    if parallel.splits_backward:
        beside = 0.0  # a pass of their own has these products
    inside = node if near else network
    micro_batch = computed + _exposed_s(one.tensor, inside, backward=beside)
    # The volumes that are not exposed are those of ring attention.
    attention = slowdown * times.attention / (3 + again)
    micro_batch += _exposed_s(
        one.sequence, inside, forward=(1 + again) * attention, backward=2 * attention
    )
    experts_near = parallel.ranks_per_expert * parallel.expert <= gpus_per_node
    micro_batch += _exposed_s(one.experts, node if experts_near else network)
    outside, passes = node if small else network, sent.data_passes
    between = _exposed_s(sent.pipeline, outside) + _exposed_s(
        sent.data, outside, forward=passes * forward, backward=passes * (computed - forward)
    )
    return (
        micro_batch * (number * max(work_of_stages(plan)) + schedule_of(plan).idle)
        + slowdown * times.step
        + between
    )


def _exposed_s(
    volume: Volume, bandwidth: float, *, forward: float = 0.0, backward: float = 0.0
) -> float:
    """Return the seconds of communication that no computation hides.

    Args:
        bandwidth: in bytes a second.
        forward: seconds of the forward passes that can hide it.
        backward: of the backward passes.
    """
    time = volume.exposed / bandwidth
    for sent, hiding in ((volume.forward, forward), (volume.backward, backward)):
        hidden = min(sent / bandwidth, hiding)
        time += sent / bandwidth - hidden + CONTENTION * hidden
    return time
