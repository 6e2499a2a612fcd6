"""What GPUs can do, by their makers' data sheets."""

import re
from dataclasses import dataclass, replace

from megatron.common.errors import ConfigError

GIB = 2**30
_PCIE_GB_S = 32.0  # sixteen lanes of the fourth generation, in one direction


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU and its ways to others.

    Args:
        memory_gib: what programs can allocate.
        tflops: of dense matrix products in 16 bits, at most.
        tflops_fp32: the same in 32 bits (TF32 where there is one).
        node_gb_s: gigabytes a second that it sends to others of its node.
        network_gb_s: gigabytes a second that it sends to other nodes: one 200 or 400 Gb/s adapter
            each, 100 Gb/s shared by two for the V100.
    """

    name: str
    memory_gib: float
    tflops: float
    tflops_fp32: float
    node_gb_s: float
    network_gb_s: float
    has_bf16: bool = True

    def peak_flops(self, dtype: str) -> float:
        """Return operations a second in a number format."""
        return 1e12 * (self.tflops_fp32 if dtype == "fp32" else self.tflops)


DEVICES = {
    device.name: device
    for device in (
        Device(
            name="v100-16gb",
            memory_gib=15.8,
            tflops=125,
            tflops_fp32=15.7,
            node_gb_s=150,
            network_gb_s=6.25,
            has_bf16=False,
        ),
        Device(
            name="v100-32gb",
            memory_gib=31.7,
            tflops=125,
            tflops_fp32=15.7,
            node_gb_s=150,
            network_gb_s=6.25,
            has_bf16=False,
        ),
        Device(
            name="a100-40gb",
            memory_gib=39.4,
            tflops=312,
            tflops_fp32=156,
            node_gb_s=300,
            network_gb_s=25,
        ),
        Device(
            name="a100-80gb",
            memory_gib=79.2,
            tflops=312,
            tflops_fp32=156,
            node_gb_s=300,
            network_gb_s=25,
        ),
        Device(
            name="h100-80gb",
            memory_gib=79.1,
            tflops=989,
            tflops_fp32=494,
            node_gb_s=450,
            network_gb_s=50,
        ),
        Device(
            name="h200",
            memory_gib=139.8,
            tflops=989,
            tflops_fp32=494,
            node_gb_s=450,
            network_gb_s=50,
        ),
        Device(
            name="b200",
            memory_gib=178.0,
            tflops=2250,
            tflops_fp32=1125,
            node_gb_s=900,
            network_gb_s=50,
        ),
    )
}
"""By the name of --gpu. Sources: NVIDIA's data sheets of V100 SXM2, A100 SXM, H100 SXM, H200 SXM
and B200; products of dense matrices."""

RESERVED_BYTES = 3 * GIB
"""Of each GPU: CUDA's context, buffers of NCCL, and what fragmentation keeps from use."""


def device_of(name: str) -> Device:
    """Return the device called `name`.

    Raises:
        ConfigError: there is none.
    """
    if name not in DEVICES:
        raise ConfigError(f"--gpu {name} is none of {', '.join(DEVICES)}")
    return DEVICES[name]


def known_device(name: str, memory_bytes: int) -> Device | None:
    """Return the device that calls itself `name`, as in "NVIDIA A100-SXM4-80GB"; None if unknown.

    Boards for PCIe, also in pairs (NVL), compute slower than those of DEVICES and are not known,
    but for the A100's, whose data sheet gives both the same but for the way to others.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    family = [d for d in DEVICES.values() if d.name.partition("-")[0] in words]
    found = min(family, key=lambda d: abs(d.memory_gib * GIB - memory_bytes), default=None)
    if found is None or not {"pcie", "nvl"} & set(words):
        return found
    return replace(found, node_gb_s=_PCIE_GB_S) if "a100" in words else None
