"""What is saved, where, how often, and what a run starts from."""

from dataclasses import dataclass
from typing import Annotated

from megatron.config.parsing.flags import Spelling


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints, as the user asked for them."""

    save: str | None = None
    """Directory to save checkpoints in."""

    save_interval: int | None = None
    """Iterations between checkpoints; the run's last state is always saved (default: only that)."""

    async_save: bool = False
    """Go on training while a checkpoint is written: a step waits only until the state is copied to
    this machine's memory, which must hold it once more."""

    keep_last: int | None = None
    """Number of newest checkpoints in --save to keep; older ones are removed once a new one is
    verified and a finite step has followed it (default: all are kept, unless --keep-every is
    given)."""

    keep_every: Annotated[int | None, Spelling("--keep-every", ("--save-retain-interval",))] = None
    """Keep the checkpoints of iterations that are multiples of this, too; --keep-last is 1 when
    not said."""

    load: str | None = None
    """Directory to resume from. When it is also --save and holds no checkpoint yet, training
    starts from the beginning."""

    ckpt_step: int | None = None
    """Go on from the checkpoint of this iteration in --load instead of the newest. When --load is
    also --save, those behind it get names that begin with aside-."""

    use_checkpoint_args: Annotated[
        bool, Spelling("--use-checkpoint-args", ("--use-checkpoint-config",))
    ] = False
    """Take the flags of network, experts and tokenizer from the checkpoint in --load; what is said
    wins, and the difference is told."""

    universal_checkpoint: bool = False
    """Look in --load for what tools/convert_checkpoint/ds_to_universal.py wrote, too, and go on
    from the newest. A run in another layout than the saved one needs no such step."""

    reshape_buffer_mb: int = 64
    """Memory of each rank, in MB, for the rows that are under way while a checkpoint of another
    layout is loaded, beside the state that they fill."""

    exit_on_missing_checkpoint: bool = False
    """Fail when --load holds no checkpoint, also when it is --save."""

    finetune: bool = False
    """Take the weights of --load alone: a new optimizer, new random streams, iteration 0."""

    reset_progress: bool = False
    """Go on from --load with its weights and optimizer, but count from iteration 0 and sample 0."""

    no_load_optim: bool = False
    """Start the optimizer anew instead of loading its state."""

    no_load_rng: bool = False
    """Seed the random streams anew instead of loading their states."""

    no_save_optim: bool = False
    """Leave the optimizer's state out of checkpoints: smaller, and only for --finetune or
    --no-load-optim."""

    no_save_rng: bool = False
    """Leave the random streams out of checkpoints: only for --finetune or --no-load-rng."""
