"""GPUs, their driver, and whether they compute what is right."""

from collections.abc import Iterator

import torch

from megatron.diagnostics.doctor.findings import Problem, Section
from megatron.diagnostics.doctor.host import nodes_of_gpus
from megatron.diagnostics.doctor.sizes import told_bytes
from megatron.training.checkpoints.system_info import driver


def devices_section() -> Section:
    """Return the GPUs that this process sees."""
    number = torch.cuda.device_count()
    told = driver()
    facts = {
        "NVIDIA driver": told or "none",
        "CUDA of PyTorch": str(torch.version.cuda or "none: a build for CPUs"),
        "NCCL of PyTorch": nccl_version(),
        "visible GPUs": str(number),
        "backends": ", ".join(backends()),
        **{f"GPU {index}": _told(index) for index in range(number)},
    }
    problems = device_problems(
        driver=told, build=str(torch.version.cuda or ""), nodes=nodes_of_gpus(), visible=number
    )
    wrong = (p for index in range(number) for p in product_problems(torch.device("cuda", index)))
    return Section("devices", facts, (*problems, *wrong))


def device_problems(*, driver: str, build: str, nodes: int, visible: int) -> Iterator[Problem]:
    """Yield why PyTorch does not see GPUs that are there.

    Args:
        driver: version of NVIDIA's; "" without one.
        build: version of CUDA that PyTorch was built for; "" for CPUs.
        nodes: GPUs that the system shows as files.
        visible: GPUs that PyTorch sees.
    """
    if not nodes or visible:
        return
    if not build:
        yield Problem(
            f"this machine has {nodes} NVIDIA GPUs (driver {driver or 'unknown'}), but this "
            "PyTorch is a build for CPUs",
            "install the build for CUDA",
        )
    else:
        yield Problem(
            f"this machine has {nodes} NVIDIA GPUs, but PyTorch sees none",
            "look at nvidia-smi and CUDA_VISIBLE_DEVICES; the driver "
            f"({driver or 'none is loaded'}) must be new enough for CUDA {build}",
        )


def product_problems(device: torch.device) -> Iterator[Problem]:
    """Yield whether `device` multiplies small matrices wrongly or not at all."""
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, dtype=torch.float64, generator=draw) for _ in range(2))
    mend = "use another device, and show this one to whoever looks after the machine"
    try:
        product = (a.to(device) @ b.to(device)).cpu()
    except RuntimeError as error:
        first = str(error).strip().partition("\n")[0]
        yield Problem(f"{device} cannot multiply matrices: {first}", mend)
        return
    if not torch.allclose(product, a @ b, rtol=1e-9, atol=1e-9):
        yield Problem(f"{device} multiplies matrices wrongly", mend)


def nccl_version() -> str:
    """Return the version of NCCL that PyTorch brings."""
    if not torch.cuda.is_available():
        return "none in use"
    return ".".join(map(str, torch.cuda.nccl.version()))


def backends() -> Iterator[str]:
    """Yield what processes can talk through."""
    if torch.distributed.is_gloo_available():
        yield "gloo"
    if torch.distributed.is_nccl_available():
        yield "nccl"
    if torch.distributed.is_mpi_available():
        yield "mpi"


def _told(index: int) -> str:
    device = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return (
        f"{device.name}, {told_bytes(free)} of {told_bytes(total)} free, capability "
        f"{device.major}.{device.minor}, {device.uuid}"
    )
