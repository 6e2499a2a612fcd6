"""Report of the estimates of a run, as text."""

from collections.abc import Iterator
from datetime import timedelta

from megatron.config.plan.plan import Plan
from megatron.planner.devices import GIB, RESERVED_BYTES, Device
from megatron.planner.memory import (
    Memory,
    checkpoint_bytes,
    memory_of_stages,
    micro_batches_under_way,
)
from megatron.planner.search import Found, obstacle
from megatron.planner.speed import Speed, bubble_of, step_flops
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
    for stage, memory in zip(stages_of(plan), memory_of_stages(plan, device=device), strict=True):
        parts = [stage.has_embedding and "embedding", stage.has_head and "head"]
        held = ", ".join([f"{len(stage.layers)} layers", *(part for part in parts if part)])
        under_way = micro_batches_under_way(plan, stage)
        yield (
            f"stage {stage.index} ({held}; micro-batches under way: {under_way:g}): "
            f"{_size(memory.total)} per rank | {parts_line(memory)}"
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
    plan: Plan, device: Device, speed: Speed, *, source: str, price_per_gpu_hour: float | None
) -> Iterator[str]:
    """Yield whether the run fits devices of this kind and, if so, its length and its cost.

    Args:
        source: where the time of a step is known from.
    """
    why = obstacle(plan, device)
    usable = device.memory_gib - RESERVED_BYTES / GIB
    fullest = max(memory.total for memory in memory_of_stages(plan))
    room = f"fullest rank: {_size(fullest)} of {usable:.1f} GiB"
    if why:
        yield room
        yield f"does not run on {device.name}: {why}"
        return
    yield f"{device.name}: fits | {room}"
    yield f"times are from {source}"
    yield (
        f"step: {speed.step_s:.2f} s | MFU: {100 * speed.mfu:.1f}% | "
        f"tokens per second: {speed.tokens_per_second:,.0f}"
    )
    yield "run: " + " | ".join(_price(speed, price_per_gpu_hour))


def micro_batch_line(size: int, speed: Speed) -> str:
    """Return the advice to take a larger micro-batch."""
    return (
        f"larger micro-batches pay: --micro-batch-size {size} fits too, with a step of "
        f"{speed.step_s:.2f} s and an MFU of {100 * speed.mfu:.1f}%"
    )


def search_lines(
    found: Found, *, most: int, source: str, price_per_gpu_hour: float | None = None
) -> Iterator[str]:
    """Yield the fastest layouts, at most so many, and why the others cannot be run.

    Args:
        source: where the times of steps are known from.
    """
    yield f"{len(found.fitting)} layouts fit | times are from {source}"
    for rank, fitting in enumerate(found.fitting[:most], 1):
        speed = fitting.speed
        line = (
            f"{rank}. {fitting.layout} | step {speed.step_s:.2f} s | MFU "
            f"{100 * speed.mfu:.1f}% | fullest rank {_size(fitting.peak_bytes)}"
        )
        if price_per_gpu_hour is not None:
            line += " | run " + " | ".join(_price(speed, price_per_gpu_hour))
        yield line
    if found.fitting:
        yield f"flags of the first: {found.fitting[0].layout.flags()}"
    for refusal in found.refused:
        where = f" ({', '.join(refusal.where)})" if refusal.where else ""
        yield f"{refusal.count} do not run{where}: {refusal.why}"
        yield from (f"  {part}" for part in refusal.partly)
    if not found.fitting:
        yield "no layout can be run: take more or larger GPUs, or another batch size"


def _price(speed: Speed, price_per_gpu_hour: float | None) -> Iterator[str]:
    yield f"{timedelta(seconds=round(speed.run_s))}"
    yield f"GPU hours: {speed.gpu_hours:,.0f}"
    if price_per_gpu_hour is not None:
        yield f"cost: {speed.gpu_hours * price_per_gpu_hour:,.0f}"


def _format_sent(volume: Volume) -> str:
    beside = 1 - volume.exposed / volume.total
    return _size(volume.total) + (f" ({100 * beside:.0f}% overlapped)" if beside else "")


def _size(count: float) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} bytes"
