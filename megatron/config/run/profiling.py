"""Which steps are looked into, and with what."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ProfilingConfig:
    """Profiles, as the user asked for them."""

    profile: bool = False
    """Record some iterations with PyTorch's profiler, as trace files."""

    profile_step_start: int = 10
    """First iteration that is recorded."""

    profile_step_end: int = 12
    """First iteration that is not recorded any more."""

    profile_ranks: list[int] | None = None
    """Ranks that record (default: rank 0)."""

    profile_dir: str | None = None
    """Directory for the trace files (default: --tensorboard-dir)."""

    nvtx_ranges: bool = False
    """Mark the parts of a step for NVIDIA's tools; needs GPUs."""
