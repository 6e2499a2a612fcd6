"""How long the run is and how large its batches are."""

from dataclasses import dataclass
from typing import Annotated

from megatron.config.parsing.flags import Spelling


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The run, as the user asked for it."""

    micro_batch_size: int
    """Samples per model replica and forward pass."""

    global_batch_size: int | None = None
    """Samples per optimizer step (default: one micro-batch per replica)."""

    rampup_batch_size: list[int] | None = None
    """Three numbers of samples: first global batch size, increment, and how many samples the rise
    to --global-batch-size takes."""

    train_iters: int | None = None
    """Length of the run in optimizer steps; give this, --train-samples or --train-tokens."""

    train_samples: int | None = None
    """Length of the run in samples; give this, --train-iters or --train-tokens."""

    train_tokens: int | None = None
    """Length of the run in tokens trained on; beside --train-iters or --train-samples, a limit
    that may end the run earlier."""

    seed: int = 1234
    """Seed of initial weights, dropout and data order; greater than 0."""

    exit_interval: int | None = None
    """Save and leave at the next iteration that is a multiple of this."""

    exit_duration_in_mins: int | None = None
    """Save and leave after the first iteration that ends so many minutes after the start."""

    exit_signal_handler: bool = False
    """Leave after the current iteration when a SIGTERM, SIGINT (Ctrl-C) or SIGUSR1 comes to any
    process. Runs with --save do that without this flag, after a last checkpoint."""

    kill_switch_path: Annotated[
        str | None, Spelling("--kill-switch-path", ("--kill-switch-file",))
    ] = None
    """Save and leave after the current iteration when this file is there; do not start while it
    is."""

    hang_timeout: float | None = None
    """Seconds without a step, an evaluated batch or a save after which the run ends as hung, with
    the stacks of all processes in --save; each part of the start, the first step and a save may
    take 5 times as long. Default: no limit."""

    max_restarts: int = 0
    """Start this command under torch.distributed.run, which starts it again at most so many times
    when it fails; each time it goes on from --load. Under that launcher already, give its own
    option of this name instead."""

    chaos: str | None = None
    """Faults that the run injects into itself, to prove that it and its cluster survive them: words
    KEY=NUMBER with commas between. seed; chances for each step and rank: kill, stall (for stall_s
    seconds, 60); for each save and rank: kill_save, slow_disk (slow_disk_s seconds a file, 1),
    full_disk; for each checkpoint: flip a bit, truncate a file. Never for a run to be kept."""

    skip_train_iteration_range: list[str] | None = None
    """Iterations to leave out, as A-B with both ends: their samples are passed over, and neither
    weights nor optimizer change."""

    check_for_nan_in_loss_and_grad: bool = True
    """End the run after --max-nan-steps steps in a row whose loss or gradient is no finite number.
    Such a step never reaches the weights; what fp16 throws away to find its loss scale does not
    count."""

    max_nan_steps: int = 5
    """Steps in a row without a finite loss and gradient that end the run."""

    replica_check_interval: Annotated[
        int | None,
        Spelling("--replica-check-interval", ("--check-weight-hash-across-dp-replicas-interval",)),
    ] = None
    """Iterations between comparisons of what ranks must have in common: weights, random streams
    and counters. A difference ends the run. Never when not said."""

    deterministic_mode: bool = False
    """Use algorithms that give the same bits each time, and fail where there is none."""

    expect_params: str | None = None
    """Number of parameters that the network must have within 5 percent, such as 350M or 1.3B."""

    config: str | None = None
    """A YAML file of flags (without the dashes); flags on the command line win over it."""
