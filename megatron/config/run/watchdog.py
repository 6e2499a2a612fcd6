"""Watchdog and restarts: timeouts of a run that hangs, resolution and checks."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.optimization.training import TrainingConfig
from megatron.config.parallelism.layout import ParallelConfig
from megatron.config.parsing.declaration import range_problems
from megatron.config.run.checkpoint import CheckpointConfig, goes_on

NCCL_HANG_S = 1200.0
"""Default of --hang-timeout over NCCL, where a rank whose peer died blocks until PyTorch's timeout
aborts it without naming the cause."""


@dataclass(frozen=True, kw_only=True)
class WatchPlan:
    """Timeouts and restarts; 0: no limit of ours."""

    hang_timeout_s: float  # without progress
    group_timeout_minutes: int  # in one operation of a process group
    max_restarts: int  # by torch's launcher


def plan_watch(
    training: TrainingConfig,
    parallel: ParallelConfig,
    checkpoint: CheckpointConfig,
    *,
    device: str,
    world_size: int,
) -> WatchPlan:
    """Return timeouts and restarts."""
    over_nccl = world_size > 1 and device == "cuda" and parallel.distributed_backend != "gloo"
    default = NCCL_HANG_S if over_nccl and checkpoint.save else 0.0
    return WatchPlan(
        hang_timeout_s=default if training.hang_timeout is None else training.hang_timeout,
        group_timeout_minutes=parallel.distributed_timeout_minutes or 0,
        max_restarts=training.max_restarts,
    )


def watch_problems(
    training: TrainingConfig, parallel: ParallelConfig, checkpoint: CheckpointConfig
) -> Iterator[str]:
    """Yield every problem of timeouts and restarts."""
    hang, restarts = training.hang_timeout, training.max_restarts
    yield from range_problems(training, "hang_timeout", "max_restarts")
    if hang and not checkpoint.save:
        yield "--hang-timeout needs --save: the stacks of all processes are gathered there"
    yield from range_problems(parallel, "distributed_timeout_minutes")
    if restarts and not goes_on(checkpoint):
        yield "--max-restarts needs --save and the same directory as --load, to resume from"
    if restarts and checkpoint.ckpt_step is not None:
        yield "--max-restarts resumes from the newest checkpoint: leave --ckpt-step out"
