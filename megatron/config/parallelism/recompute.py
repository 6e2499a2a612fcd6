"""What is computed again in the backward pass instead of being kept."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.config.parsing.flags import Spelling


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Recomputation, as the user asked for it."""

    recompute_granularity: Literal["selective", "full"] | None = None
    """What is computed again in the backward pass: attention itself (selective: little work for
    much memory where scores are kept), or whole layers (full)."""

    recompute_activations: bool = False
    """Megatron's spelling of --recompute-granularity selective."""

    checkpoint_activations: bool = False
    """Keep only the input of every transformer layer and compute the rest again in the backward
    pass: less memory for about a third more computation. Older spelling of --recompute-granularity
    full --recompute-method uniform."""

    recompute_method: Literal["uniform", "block"] | None = None
    """Which whole layers: all of them, in groups of --recompute-num-layers of which the first
    input is kept (uniform), or the first --recompute-num-layers of each stage, one by one (block)."""

    recompute_num_layers: Annotated[
        int | None, Spelling("--recompute-num-layers", ("--checkpoint-num-layers",))
    ] = None
    """Layers in a group (uniform) or layers of each stage that are computed again (block)."""

    distribute_saved_activations: Annotated[
        bool,
        Spelling(
            "--distribute-saved-activations",
            ("--distribute-checkpointed-activations", "--partition-activations"),
        ),
    ] = False
    """Divide what full recomputation keeps over the tensor-parallel ranks."""

    contiguous_checkpointing: Annotated[
        bool, Spelling("--contiguous-checkpointing", ("--contigious-checkpointing",))
    ] = False
    """Copy what --partition-activations keeps into one buffer, against fragmented memory."""

    checkpoint_in_cpu: bool = False
    """Move what full recomputation keeps to the memory of the CPU."""

    synchronize_each_layer: bool = False
    """Wait for the device before and after every recomputed part."""

    profile_backward: bool = False
    """Log the time of every recomputed part's forward and backward pass."""
