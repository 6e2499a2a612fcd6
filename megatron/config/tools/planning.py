"""Flags of the planner, in addition to training's."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PlanningConfig:
    """The machines that the run is planned for."""

    search: int | None = None
    """Search all layouts of this many GPUs instead of planning the layout of the command line."""

    show: int = 10
    """Layouts that --search shows."""

    gpus_per_node: int = 8
    """GPUs of a machine, between which tensor parallelism stays."""

    gpu: str | None = None
    """Kind of GPU, such as h100-80gb, for memory, time and cost (default: a100-80gb in --search).
    An unknown one lists all."""

    mfu: float | None = None
    """Model FLOPs utilisation to assume, between 0 and 1 (default: estimated)."""

    measured: str | None = None
    """Results of tests/gpu/prove.sh on this kind of GPU, whose times calibrate the estimate."""

    price_per_gpu_hour: float | None = None
    """Price of an hour of one GPU, in any currency."""

    vocabulary: int | None = None
    """Vocabulary size of the tokenizer (default: that of --vocab-file, if the file exists, or the
    --preset's, or 50257)."""
