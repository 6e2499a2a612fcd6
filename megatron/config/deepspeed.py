"""What DeepSpeed is told."""

from dataclasses import dataclass
from typing import Annotated

from megatron.config.flags import Spelling


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig:
    """DeepSpeed's settings, as the user asked for them."""

    deepspeed_config: Annotated[str | None, Spelling("--deepspeed_config")] = None
    """A DeepSpeed JSON file. What it repeats must agree with the flags, "auto" and what it leaves
    out is filled in from them, and keys without a flag pass through."""

    zero_stage: int | None = None
    """What ZeRO divides over the data-parallel ranks: 0 nothing, 1 optimizer state, 2 gradients
    too, 3 weights too; the JSON's stage, or else 0, when not said."""
