"""In which number formats the network computes."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """The precision, as the user asked for it; fp32 when neither flag is given."""

    fp16: bool = False
    """Compute in 16-bit floats with a dynamic loss scale (GPUs only)."""

    bf16: bool = False
    """Compute in bfloat16; gradients are accumulated and reduced in 32-bit floats."""
