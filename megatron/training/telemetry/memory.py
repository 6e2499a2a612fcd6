"""Peak memory of a run's processes on GPUs and hosts: the worst rank's."""

import psutil
import torch
import torch.distributed as dist

from megatron.common.host_memory import available_bytes

ALLOCATED, RESERVED = "allocated (GiB)", "reserved (GiB)"
RESIDENT, AVAILABLE = "resident (GiB)", "host available (GiB)"


def worst_memory() -> dict[str, float]:
    """Return the peak memory of a rank on its device and host, and the least available on a host.

    On a GPU both are peaks since the start: what tensors took, and what PyTorch kept for them. What
    this machine does not report is left out.

    Communication: one all-reduce of four numbers over all ranks.
    """
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    local = (*_device_bytes(), _resident_bytes(), -available_bytes())
    worst = torch.tensor(local, dtype=torch.float64, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    names = (ALLOCATED, RESERVED, RESIDENT, AVAILABLE)
    return {
        name: abs(size) / 2**30 for name, size in zip(names, worst.tolist(), strict=True) if size
    }


def _device_bytes() -> tuple[int, int]:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return 0, 0
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)
