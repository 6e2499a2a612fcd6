"""What is saved, where, how often, and what a run starts from."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints, as the user asked for them."""

    save: str | None = None
    """Directory to save checkpoints in."""

    save_interval: int | None = None
    """Iterations between checkpoints; the run's last state is always saved."""

    load: str | None = None
    """Directory to resume from. When it is also --save and holds no checkpoint yet, training
    starts from the beginning."""
