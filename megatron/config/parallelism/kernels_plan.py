"""Kernels of the operations inside layers, resolved: a leaf without imports of flags."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

AttentionName = Literal["sdpa", "flash", "fused-softmax", "reference"]
"""PyTorch's scaled_dot_product_attention; the flash-attn package; written-out scores and the
softmax kernels; the same in at least 32 bits with the reference softmax."""

FLAGS: Mapping[str, str] = {
    "softmax": "--no-masked-softmax-fusion",
    "norm": "--no-layer-norm-fusion",
    "activation": "--no-bias-gelu-fusion",
    "bias, dropout, residual": "--no-bias-dropout-fusion",
    "rotary positions": "--no-rope-fusion",
    "cross-entropy": "--no-cross-entropy-fusion",
}
"""The operations that have fused kernels, and the flag that turns each one's off."""


@dataclass(frozen=True, kw_only=True)
class KernelsPlan:
    """Implementations of the operations inside layers."""

    source: Literal["auto", "triton", "apex", "reference"]
    unfused: tuple[str, ...]  # operations that are left to the reference
    attention: AttentionName
    softmax_in_fp32: bool
    must_fuse: bool  # refuse to run where a wanted kernel cannot be used
