"""NVIDIA GPUs and driver of the system, by its files: without PyTorch, which may see none of them."""

from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/version")


def driver(file: Path = _DRIVER) -> str:
    """Return the version of NVIDIA's driver."""
    try:
        first = file.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return ""
    return next((word for word in first.split() if word[0].isdigit() and "." in word), first)


def num_nvidia_devices(folder: Path = Path("/dev")) -> int:
    """Return the number of NVIDIA GPUs of the system, whether or not PyTorch can use them."""
    return len([*folder.glob("nvidia[0-9]*")])


def gpu_obstacle(*, driver: str, build: str, nodes: int) -> tuple[str, str] | None:
    """Return why PyTorch sees no GPU, and the remedy; None where the system has none.

    Args:
        driver: version of NVIDIA's; "" without one.
        build: version of CUDA that PyTorch was built for; "" for CPUs.
        nodes: GPUs with a device file.
    """
    if not nodes:
        return None
    if not build:
        return (
            f"this machine has {nodes} NVIDIA GPUs (driver {driver or 'unknown'}), but this "
            "PyTorch is a build for CPUs",
            "install the build for CUDA",
        )
    return (
        f"this machine has {nodes} NVIDIA GPUs, but PyTorch sees none",
        "look at nvidia-smi and CUDA_VISIBLE_DEVICES; the driver "
        f"({driver or 'none is loaded'}) must be new enough for CUDA {build}",
    )
