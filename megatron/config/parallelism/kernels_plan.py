"""Kernels of the operations inside layers, resolved: a leaf without imports of flags."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

FLAGS: Mapping[str, str] = {
    "softmax": "--no-masked-softmax-fusion",
    "norm": "--no-layer-norm-fusion",
    "activation": "--no-bias-gelu-fusion",
    "bias, dropout, residual": "--no-bias-dropout-fusion",
    "rotary positions": "--no-rope-fusion",
    "cross-entropy": "--no-cross-entropy-fusion",
}
"""The operations that have fused kernels, and the flag that turns each one's off."""

CompileMode = Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs"]
"""Modes of torch.compile."""

NARROWEST_FLEX_HEAD = 16
"""Fewest features of a head that PyTorch's FlexAttention supports on GPUs."""


@dataclass(frozen=True, kw_only=True)
class KernelsPlan:
    """Implementations of the operations inside layers."""

    source: Literal["auto", "triton", "apex", "reference"]
    unfused: tuple[str, ...]  # operations that are left to the reference
    attention: str  # a name in ATTENTIONS, but auto
    chooses_attention: bool  # whether GPUs may take FlexAttention instead, where it saves masks
    softmax_in_fp32: bool
    compile: Literal["none"] | CompileMode  # how transformer layers are compiled
    must_fuse: bool  # refuse to run where a wanted kernel cannot be used
    fp8_format: Literal["", "e4m3", "hybrid"] = ""  # of linear layers' products; "": their dtype
    fp8_recipe: Literal["tensorwise", "rowwise"] = "tensorwise"  # one scale per tensor, or per row
    loss_chunk_tokens: int = 0  # tokens whose logits exist at once; 0: all of a micro-batch
