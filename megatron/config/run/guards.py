"""What looks after a run, and a step of it taken again."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GuardsConfig:
    """What looks after a run, as the user asked for it."""

    spike_policy: str | None = None
    """What a loss far above those before it leads to: going back to a checkpoint in --save and
    passing over the samples. Words KEY=NUMBER with commas between: zscore (6) and norm (0: not
    looked at) for loss and gradient norm, window (50) steps they are compared with, rollback (1:
    to the newest checkpoint), skip (1) iterations up to the spike and after (0) it, max (3)
    times in the run."""

    replay_step: int | None = None
    """Take this step of the run in --load again, from the nearest checkpoint before it, save and
    write nothing, and compare it with the journal."""
