"""What can be asked of the planner, besides the flags of training."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PlanningConfig:
    """The machines that the run is planned for."""

    search: int | None = None
    """Instead of the layout of the command line, look at all layouts of so many GPUs."""

    show: int = 10
    """Layouts that --search shows."""

    gpus_per_node: int = 8
    """GPUs of a machine, between which tensor parallelism stays."""

    gpu: str | None = None
    """Kind of GPU, such as h100-80gb, for memory, time and cost (default: a100-80gb in --search).
    An unknown one lists all."""

    mfu: float | None = None
    """Model FLOPs utilisation to reckon with, between 0 and 1 (default: estimated)."""

    price_per_gpu_hour: float | None = None
    """What an hour of one GPU costs, in whatever currency the total is wanted."""

    vocabulary: int = 50257
    """Tokens that the tokenizer knows; its files are not read."""
