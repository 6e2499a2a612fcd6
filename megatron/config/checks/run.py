"""A run: checks of evaluation, checkpoints, logs, the watchdog, hooks and guards."""

from collections.abc import Iterator

from megatron.config.checks.start import Start
from megatron.config.parallelism.layout import replica_size, replicas_with_all_experts
from megatron.config.plugins import hooks_of_sections
from megatron.config.run.checkpoint import checkpoint_problems
from megatron.config.run.evaluation import evaluation_problems
from megatron.config.run.guards import guards_problems
from megatron.config.run.logging import logging_problems
from megatron.config.run.watchdog import watch_problems


def run_problems(start: Start) -> Iterator[str]:
    """Yield problems of everything around the steps: evaluation, checkpoints, logging, guards."""
    config, zero_stage = start.config, start.zero.given_stage
    yield from evaluation_problems(config.evaluation, config.checkpoint, zero_stage=zero_stage)
    yield from checkpoint_problems(config.checkpoint, start.deepspeed, zero_stage=zero_stage)
    yield from logging_problems(
        config.logging, config.profiling, world_size=start.world_size, device=start.device
    )
    yield from _slow_rank_problems(start)
    yield from watch_problems(config.training, config.parallel, config.checkpoint)
    for hook in hooks_of_sections(config.extensions).values():
        yield from hook.problems(config, trains=start.trains)
    yield from guards_problems(config.guards, config.checkpoint)
    if config.parallel.distributed_backend == "nccl" and start.device == "cpu":
        yield (
            "--distributed-backend nccl needs GPUs and this run is on CPUs: write gloo, or leave "
            "the flag out"
        )


def _slow_rank_problems(start: Start) -> Iterator[str]:
    """Yield why ranks of replicas cannot be compared."""
    parallel = start.config.parallel
    if start.config.logging.slow_rank_factor is None:
        return
    replicas = start.world_size // replica_size(parallel)
    ranks = start.config.ranks_with_all_experts
    if start.zero.given_stage == 3:
        yield (
            "--slow-rank-factor cannot find slow ranks at ZeRO stage 3, where each layer waits "
            "for the weights of all: leave it out"
        )
    elif replicas <= 1:
        yield (
            "--slow-rank-factor compares replicas, and this run has no second one: start more "
            "processes, or leave it out"
        )
    elif replicas <= replicas_with_all_experts(parallel, ranks):
        yield (
            "--slow-rank-factor cannot find slow ranks that wait for each other's tokens in "
            f"each layer, as all {replicas} replicas do at this --moe-expert-parallel-size: "
            "lower that, or leave it out"
        )
