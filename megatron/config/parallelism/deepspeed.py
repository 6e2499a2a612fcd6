"""What DeepSpeed is told."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.config.parsing.flags import Spelling


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig:
    """DeepSpeed's settings, as the user asked for them."""

    deepspeed_config: Annotated[str | None, Spelling("--deepspeed_config")] = None
    """A DeepSpeed JSON file. What it repeats must agree with the flags, "auto" and what it leaves
    out is filled in from them, and keys without a flag pass through."""

    zero_stage: int | None = None
    """What ZeRO divides over the data-parallel ranks: 0 nothing, 1 optimizer state, 2 gradients
    too, 3 weights too (default: the JSON's stage, or else 0)."""

    zero_reduce_scatter: bool = False
    """Reduce gradients only to the rank that keeps them."""

    zero_contiguous_gradients: Annotated[
        bool, Spelling("--zero-contiguous-gradients", ("--zero-contigious-gradients",))
    ] = False
    """Copy gradients into one buffer as they come."""

    zero_reduce_bucket_size: int = 0
    """Elements reduced at a time; 0 leaves it to the JSON or DeepSpeed."""

    zero_allgather_bucket_size: int = 0
    """Elements gathered at a time; 0 leaves it to the JSON or DeepSpeed."""

    remote_device: Literal["none", "cpu", "nvme"] | None = None
    """Where ZeRO stage 3 keeps the weights that are not in use; nvme takes its folder from
    zero_optimization.offload_param.nvme_path of the JSON."""

    use_pin_memory: bool = False
    """Keep what is offloaded in page-locked memory, which GPUs read faster."""
