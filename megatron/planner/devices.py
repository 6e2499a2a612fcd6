"""GPUs by their data sheets: memory, FLOPs, bandwidths."""

import re
from dataclasses import dataclass, replace

from megatron.common.errors import ConfigError

GIB = 2**30
_PCIE_GB_S = 32.0  # sixteen lanes of the fourth generation, in one direction


@dataclass(frozen=True)
class Device:
    """A GPU and its ways to others.

    Args:
        memory_gib: what programs can allocate.
        tflops: of dense matrix products in 16 bits, at most.
        tflops_fp32: the same in 32 bits (TF32 where there is one).
        node_gb_s: gigabytes a second that it sends to others of its node.
        network_gb_s: gigabytes a second that it sends to other nodes: one 200 or 400 Gb/s adapter
            each, 100 Gb/s shared by two for the V100.
        memory_gb_s: gigabytes a second that it reads and writes in its own memory.
        product_share: of the peak, that products of large matrices reach in the middle of a step,
            where the power limit lowers the clock; their operands are read besides.
    """

    name: str
    memory_gib: float
    tflops: float
    tflops_fp32: float
    node_gb_s: float
    network_gb_s: float
    memory_gb_s: float
    product_share: float
    has_bf16: bool

    @property
    def usable_bytes(self) -> float:
        """Memory that a run can use: without what CUDA and NCCL take, and fragmentation."""
        return self.memory_gib * GIB - RESERVED_BYTES

    def peak_flops(self, dtype: str) -> float:
        """Return operations a second in a number format."""
        return 1e12 * (self.tflops_fp32 if dtype == "fp32" else self.tflops)


DEVICES = {
    row[0]: Device(*row)
    for row in (
        ("v100-16gb", 15.8, 125, 15.7, 150, 6.25, 900, 0.8, False),
        ("v100-32gb", 31.7, 125, 15.7, 150, 6.25, 900, 0.8, False),
        ("a100-40gb", 39.4, 312, 156, 300, 25, 1555, 0.8, True),
        ("a100-80gb", 79.2, 312, 156, 300, 25, 2039, 0.8, True),
        ("h100-80gb", 79.1, 989, 494, 450, 50, 3350, 0.62, True),
        ("h200", 139.8, 989, 494, 450, 50, 4800, 0.62, True),
        ("b200", 178.0, 2250, 1125, 900, 50, 8000, 0.62, True),
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
        raise ConfigError(f"--gpu {name} is not one of {', '.join(DEVICES)}")
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
