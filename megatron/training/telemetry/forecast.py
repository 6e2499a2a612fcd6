"""Planner's forecast of this run's memory and speed, next to the measured values."""

import resource

import torch

from megatron.common.host_memory import available_bytes
from megatron.config.plan.plan import Plan
from megatron.planner.devices import GIB, RESERVED_BYTES, known_device
from megatron.planner.memory import memory_of_stages
from megatron.planner.speed import speed_of


def memory_warning(plan: Plan, device: torch.device, *, processes: int) -> str:
    """Return a warning if the run is predicted to need more memory than there is; "" otherwise.

    Args:
        processes: on this node, which share its memory on CPUs.
    """
    totals = [memory.total for memory in memory_of_stages(plan, device=device.type)]
    if device.type == "cuda":
        needed, there = max(totals), torch.cuda.get_device_properties(device).total_memory
        who, free = "a rank is", f"this GPU has {there / GIB:.1f} GiB"
        there -= RESERVED_BYTES
    else:
        needed, there = sum(totals) * processes // len(totals), available_bytes()
        who, free = "the ranks here are", f"{there / GIB:.1f} GiB of the machine are available"
    if needed <= there:
        return ""
    return (
        f"memory: {who} predicted to need {needed / GIB:.1f} GiB, and {free}; lower "
        "--micro-batch-size, recompute activations (--recompute-granularity full), or divide the network "
        "or its sequences over more ranks"
    )


def forecast_line(plan: Plan, samples_per_second: float) -> str:
    """Return memory and pace of rank 0, predicted and measured. For rank 0.

    On a GPU memory is the peak of tensors; on CPUs tensors are not counted separately, so the full
    process, libraries included, is compared with the expected size of its tensors.

    Args:
        samples_per_second: measured; what is predicted is the pace of the full batch.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        first, *_ = memory_of_stages(plan, device="cpu")
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return (
            f"[Rank 0] memory (MB) | predicted for tensors: {first.total / 2**20:.1f} | "
            f"measured of the process: {resident:.1f}"
        )
    first, *_ = memory_of_stages(plan)
    measured = torch.cuda.max_memory_allocated() / 2**20
    line = f"[Rank 0] memory (MB) | predicted: {first.total / 2**20:.1f} | measured: {measured:.1f}"
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    device = known_device(properties.name, properties.total_memory)
    if device:
        predicted = speed_of(plan, device).tokens_per_second
        line += (
            f" | tokens per second on {device.name}: predicted {predicted:.0f}, "
            f"measured {samples_per_second * plan.model.seq_length:.0f}"
        )
    return line
