"""In which number formats the network computes."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """The precision, as the user asked for it; fp32 when neither --fp16 nor --bf16 is given."""

    fp16: bool = False
    """Compute in 16-bit floats and scale the loss, so that small gradients survive (GPUs only)."""

    bf16: bool = False
    """Compute in bfloat16; gradients are accumulated and reduced in 32-bit floats."""

    loss_scale: float | None = None
    """Constant that multiplies the loss in fp16; 0, or nothing said: a scale that follows the
    overflows."""

    initial_loss_scale: float | None = None
    """Where the moving loss scale starts, a power of two; 2**32 when neither this nor the JSON
    says."""

    min_loss_scale: float | None = None
    """The moving loss scale never falls below this; 1 when neither this nor the JSON says."""

    loss_scale_window: float | None = None
    """Steps without overflow after which the loss scale doubles; 1000 when neither this nor the
    JSON says."""

    hysteresis: int | None = None
    """Overflows after which the loss scale is halved; 2 when neither this nor the JSON says."""

    accumulate_allreduce_grads_in_fp32: bool = False
    """Add up and reduce gradients in 32-bit floats in fp16 too; bf16 and fp32 always do."""
