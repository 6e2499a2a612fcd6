"""How long the run is and how large its batches are."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The run, as the user asked for it."""

    micro_batch_size: int
    """Samples per model replica and forward pass."""

    global_batch_size: int | None = None
    """Samples per optimizer step; one micro-batch per replica when not said."""

    rampup_batch_size: list[int] | None = None
    """Three numbers of samples: first global batch size, increment, and how many samples the rise
    to --global-batch-size takes."""

    train_iters: int | None = None
    """Length of the run in optimizer steps; give this or --train-samples."""

    train_samples: int | None = None
    """Length of the run in samples; give this or --train-iters."""

    seed: int = 1234
    """Seed of initial weights, dropout and data order; greater than 0."""

    exit_interval: int | None = None
    """Save and leave at the next iteration that is a multiple of this."""

    config: str | None = None
    """A YAML file of flags (without the dashes); flags on the command line win over it."""
