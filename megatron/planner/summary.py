"""Report of the estimates of a run, as text."""

from collections.abc import Iterator, Sequence
from datetime import timedelta

from megatron.config.plan.plan import Plan
from megatron.planner.calibration import Calibration
from megatron.planner.devices import GIB, Device
from megatron.planner.memory import (
    Memory,
    checkpoint_bytes,
    memory_of_stages,
    micro_batches_under_way,
)
from megatron.planner.search import Found, obstacle
from megatron.planner.speed import Speed, bubble_of, idle_of_stages, step_flops
from megatron.planner.stages import stages_of
from megatron.planner.traffic import Volume, traffic_of


def run_lines(plan: Plan) -> Iterator[str]:
    """Yield what the run is: its network, length, batches and checkpoints."""
    model, parallel, batch = plan.model, plan.parallel, plan.batch
    total, layers = model.num_parameters, model.num_parameters_without_embeddings
    yield f"parameters: {total:,} | without embeddings: {layers:,} | vocabulary: {model.vocabulary.vocab_size:,} tokens"
    if model.moe:
        active = model.num_active_parameters_without_embeddings
        yield f"parameters that a token passes through, without embeddings: {active:,}"
    tokens = plan.training.train_samples * model.seq_length
    yield (
        f"length: {plan.training.train_iters:,} steps | {plan.training.train_samples:,} samples | "
        f"{tokens:,} tokens | tokens per parameter: {tokens / total:.2f}"
    )
    yield (
        f"layout: {parallel.world_size} processes = tp {parallel.tensor} * pp {parallel.pipeline}"
        f"{f' ({parallel.chunks} chunks each)' if parallel.chunks > 1 else ''}"
        f"{' (zero bubble)' if parallel.splits_backward else ''} * "
        f"{'cp' if parallel.ring else 'sp'} {parallel.sequence} * dp {parallel.data} | ZeRO stage {parallel.zero_stage} | "
        f"{plan.precision.dtype} | recompute {plan.recompute.granularity}"
    )
    number = batch.num_micro_batches(batch.global_batch_size)
    yield (
        f"batch: {batch.global_batch_size} samples = {batch.micro_batch_size} * {number} "
        f"micro-batches * {batch.data_parallel_size} replicas"
    )
    if batch.scheduled_samples:
        sizes = batch.sizes_from(0)
        yield (
            f"batch ramp: {sizes[0]} to {sizes[-1]} in {len(sizes)} sizes over "
            f"{batch.scheduled_samples:,} samples | each is a multiple of "
            f"{batch.micro_batch_size * batch.data_parallel_size}"
        )
    yield f"checkpoint: {_size(checkpoint_bytes(plan))} at least"


def memory_lines(plan: Plan, *, device: str = "cuda") -> Iterator[str]:
    """Yield the memory of one rank of each stage, part by part."""
    stages, memories = stages_of(plan), memory_of_stages(plan, device=device)
    for stage, memory, idle in zip(stages, memories, idle_of_stages(plan), strict=True):
        parts = [stage.has_embedding and "embedding", stage.has_head and "head"]
        held = ", ".join([f"{len(stage.layers)} layers", *(part for part in parts if part)])
        held += f"; micro-batches under way: {micro_batches_under_way(plan, stage):g}"
        held += f"; idle, bubble included: {100 * idle:.1f}% of a step" * (len(stages) > 1)
        yield (
            f"stage {stage.index} ({held}): {_size(memory.total)} per rank | {parts_line(memory)}"
        )


def parts_line(memory: Memory) -> str:
    """Return the parts of a rank's memory."""
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "buffers": memory.buffers,
        "activations": memory.activations,
        "logits": memory.logits,
        "in passing": memory.transient,
        "on the host": memory.host,
    }
    return " | ".join(f"{name} {_size(size)}" for name, size in parts.items() if size)


def work_lines(plan: Plan) -> Iterator[str]:
    """Yield what a step computes and sends."""
    model, hardware = (step_flops(plan, recomputed=r) for r in (False, True))
    yield (
        f"FLOPs per step: {model:.4e} | with recomputation: {hardware:.4e} | "
        f"pipeline bubble: {100 * bubble_of(plan):.1f}% of a step"
        + " of equal stages"
        * (plan.parallel.pipeline > 1)
    )
    traffic = traffic_of(plan, plan.batch.num_micro_batches(plan.batch.global_batch_size))
    parts = {
        "tensor": traffic.tensor,
        "pipeline": traffic.pipeline,
        "data": traffic.data,
        "sequence": traffic.sequence,
        "experts": traffic.experts,
    }
    sent = " | ".join(
        f"{name} {_format_sent(volume)}" for name, volume in parts.items() if volume.total
    )
    yield f"sent per rank and step: {sent or 'nothing'}"


def device_lines(
    plan: Plan,
    device: Device,
    speed: Speed,
    *,
    calibration: Calibration,
    price_per_gpu_hour: float | None,
) -> Iterator[str]:
    """Yield whether the run fits devices of this kind and, if so, its length and its cost.

    Args:
        calibration: where the time of a step is known from, and how well.
    """
    why = obstacle(plan, device)
    fullest = max(memory.total for memory in memory_of_stages(plan))
    room = f"fullest rank: {_size(fullest)} of {device.usable_bytes / GIB:.1f} GiB"
    if why:
        yield room
        hint = _smaller(plan, device) if fullest > device.usable_bytes else ""
        yield f"does not run on {device.name}: {why}{hint}"
        return
    yield f"{device.name}: fits | {room}"
    yield f"times are from {calibration.source}"
    rates = [speed.tokens_per_second / factor for factor in calibration.span]
    yield (
        f"step: {_step(speed, calibration)} | {_mfu(speed, calibration)} | "
        f"tokens per second: {_number(rates)}"
    )
    yield "run: " + " | ".join(_price(speed, calibration, price_per_gpu_hour))


def _smaller(plan: Plan, device: Device) -> str:
    """Return which flags that are not given may make a plan fit devices of this kind."""
    parallel = plan.parallel
    flags = []
    if plan.precision.dtype == "fp32" and device.has_bf16:
        flags.append("--bf16")
    if not parallel.zero_stage and parallel.data > 1:
        flags.append("--zero-stage 1")
    search = f"--search {parallel.world_size} looks for a layout that fits"
    return f"; {', '.join(flags)} may make it fit, or {search}" if flags else f"; {search}"


def micro_batch_line(size: int, saved: float) -> str:
    """Return the advice to take a larger micro-batch, which saves so much of a step."""
    return (
        f"larger micro-batches pay: --micro-batch-size {size} fits too, and shortens a step "
        f"by {saved:.0%}"
    )


def partition_line(flags: str, saved: float, *, replaced: Sequence[str]) -> str:
    """Return the advice to divide layers otherwise into pipeline stages, which saves so much of a step.

    Args:
        flags: that ask for it.
        replaced: flags of the run that they replace.
    """
    instead = f", in place of {' '.join(replaced)}" if replaced else ""
    return (
        f"the stage with the head computes longest: {flags} shortens a step by {saved:.0%}{instead}"
    )


def search_lines(
    found: Found,
    *,
    most: int,
    calibration: Calibration,
    price_per_gpu_hour: float | None = None,
) -> Iterator[str]:
    """Yield the fastest layouts, at most so many, and why the others cannot be run.

    Args:
        calibration: where the times of steps are known from, and how well.
    """
    yield f"{len(found.fitting)} layouts fit | times are from {calibration.source}"
    for rank, fitting in enumerate(found.fitting[:most], 1):
        speed = fitting.speed
        yield (
            f"{rank}. {fitting.layout} | step: {_step(speed, calibration)} | "
            f"{_mfu(speed, calibration)} | fullest rank: {_size(fitting.peak_bytes)}"
            f"{' (nearly full)' if fitting.is_tight else ''} | "
            f"run: {' | '.join(_price(speed, calibration, price_per_gpu_hour))}"
        )
    if found.fitting:
        yield f"flags of the first: {found.fitting[0].layout.flags()}"
    for refusal in found.refused:
        where = f" ({_first(refusal.where, most)})" if refusal.where else ""
        yield f"{refusal.count} do not run{where}: {refusal.why}"
        yield from (f"  {part}" for part in refusal.partly[:most])
        if more := refusal.partly[most:]:
            yield f"  and some of {len(more)} more sizes (--show N lists N)"
    if not found.fitting:
        yield "no layout can be run: take more or larger GPUs, or another batch size"


def _first(names: Sequence[str], most: int) -> str:
    more = f", {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _step(speed: Speed, calibration: Calibration) -> str:
    return _from_to([f"{speed.step_s * factor:.2f}" for factor in calibration.span]) + " s"


def _mfu(speed: Speed, calibration: Calibration) -> str:
    """Return both conventions of MFU: attention in full, and without what a causal mask excludes."""
    digits = 0 if len(calibration.span) > 1 else 1
    full, causal = (
        _from_to([f"{100 * mfu / factor:.{digits}f}" for factor in reversed(calibration.span)])
        for mfu in (speed.mfu, speed.causal_mfu)
    )
    return f"MFU: {full}% (causal attention: {causal}%)"


def _price(
    speed: Speed, calibration: Calibration, price_per_gpu_hour: float | None
) -> Iterator[str]:
    span = calibration.span
    yield _duration([speed.run_s * factor for factor in span])
    hours = [speed.gpu_hours * factor for factor in span]
    yield f"GPU hours: {_number(hours)}"
    if price_per_gpu_hour is not None:
        yield f"cost: {_number([each * price_per_gpu_hour for each in hours])}"


def _from_to(texts: Sequence[str]) -> str:
    return " to ".join(dict.fromkeys(texts))


def _number(values: Sequence[float]) -> str:
    """Return a number, or both ends of a span, of which no more than two digits are known."""
    digits = 2 if len(values) > 1 else 16
    rounded = [float(f"{value:.{digits}g}") for value in values]
    return _from_to([f"{value:,.0f}" for value in sorted(rounded)])


def _duration(span: Sequence[float]) -> str:
    """Return a time, or both ends of its span in one unit."""
    if len(span) == 1:
        return str(timedelta(seconds=round(span[0])))
    units = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
    unit = next((name for name, size in units.items() if span[0] >= 2 * size), "seconds")
    return _from_to([f"{seconds / units[unit]:.0f}" for seconds in span]) + f" {unit}"


def _format_sent(volume: Volume) -> str:
    beside = 1 - volume.exposed / volume.total
    return _size(volume.total) + (f" ({100 * beside:.0f}% overlapped)" if beside else "")


def _size(count: float) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} bytes"
