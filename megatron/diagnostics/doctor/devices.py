"""Check GPUs: driver, CUDA and NCCL versions, free memory, and results of a matrix product."""

from collections.abc import Iterator

import torch

from megatron.common.nvidia import driver, gpu_obstacle, num_nvidia_devices
from megatron.diagnostics.doctor.findings import Problem, Section, format_bytes


def devices_section() -> Section:
    """Return the GPUs that this process sees."""
    number = torch.cuda.device_count()
    driver_version = driver()
    facts = {
        "NVIDIA driver": driver_version or "none",
        "CUDA of PyTorch": str(torch.version.cuda or "none: a build for CPUs"),
        "NCCL of PyTorch": nccl_version(),
        "visible GPUs": str(number),
        "backends": ", ".join(backends()),
        **{f"GPU {index}": _describe(index) for index in range(number)},
    }
    problems = device_problems(
        driver=driver_version,
        build=str(torch.version.cuda or ""),
        nodes=num_nvidia_devices(),
        visible=number,
    )
    wrong = (p for index in range(number) for p in product_problems(torch.device("cuda", index)))
    return Section("devices", facts, (*problems, *wrong))


def device_problems(*, driver: str, build: str, nodes: int, visible: int) -> Iterator[Problem]:
    """Yield a problem if PyTorch does not see the GPUs of this machine.

    Args:
        visible: GPUs that PyTorch sees.
        driver, build, nodes: see `gpu_obstacle`.
    """
    if not visible and (obstacle := gpu_obstacle(driver=driver, build=build, nodes=nodes)):
        yield Problem(*obstacle)


def product_problems(device: torch.device) -> Iterator[Problem]:
    """Yield a problem if `device` multiplies small matrices wrongly or not at all."""
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, dtype=torch.float64, generator=draw) for _ in range(2))
    mend = "use another device, and report this one to the administrator of the machine"
    try:
        product = (a.to(device) @ b.to(device)).cpu()
    except RuntimeError as error:
        first = str(error).strip().partition("\n")[0]
        yield Problem(f"{device} cannot multiply matrices: {first}", mend)
        return
    if not torch.allclose(product, a @ b, rtol=1e-9, atol=1e-9):
        yield Problem(f"{device} multiplies matrices wrongly", mend)


def nccl_version() -> str:
    """Return the version of NCCL in PyTorch."""
    if not torch.cuda.is_available():
        return "none in use"
    return ".".join(map(str, torch.cuda.nccl.version()))


def backends() -> Iterator[str]:
    """Yield the communication backends of PyTorch."""
    if torch.distributed.is_gloo_available():
        yield "gloo"
    if torch.distributed.is_nccl_available():
        yield "nccl"
    if torch.distributed.is_mpi_available():
        yield "mpi"


def _describe(index: int) -> str:
    device = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return (
        f"{device.name}, {format_bytes(free)} of {format_bytes(total)} free, capability "
        f"{device.major}.{device.minor}, {device.uuid}"
    )
