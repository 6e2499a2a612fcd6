"""Validation of a config: every problem at once, before anything is built."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.common.errors import ConfigError, raise_if_any
from megatron.config.config import Config
from megatron.config.data.data_plan import data_problems
from megatron.config.data.objective_plan import ObjectiveName, objective_problems
from megatron.config.expert_plan import expert_problems
from megatron.config.joint_plan import (
    owned_keys,
    plan_activations,
    plan_division,
    plan_rates,
    plan_steps,
    steps_problems,
)
from megatron.config.network.lora import lora_problems
from megatron.config.network.model import num_query_groups_of
from megatron.config.network.model_problems import model_problems
from megatron.config.optimization.curriculum_plan import curriculum_is_asked
from megatron.config.optimization.optimizer_plan import optimizer_problems, plan_optimizer
from megatron.config.optimization.schedule_plan import schedule_problems
from megatron.config.parallelism.ds_config import ds_config_problems, read_ds_config
from megatron.config.parallelism.kernels import kernels_problems
from megatron.config.parallelism.layout import parallel_problems, replica_size, sequence_problems
from megatron.config.parallelism.precision_plan import plan_precision, precision_problems
from megatron.config.parallelism.recompute import recompute_problems
from megatron.config.parallelism.zero_plan import zero_problems
from megatron.config.run.checkpoint_plan import checkpoint_problems
from megatron.config.run.evaluation_plan import evaluation_problems, plan_evaluation
from megatron.config.run.fault_injection_plan import chaos_problems
from megatron.config.run.guards_plan import guards_problems
from megatron.config.run.logging_plan import logging_problems
from megatron.config.run.watch_plan import watch_problems


@dataclass(frozen=True, kw_only=True)
class Validated:
    """A config without problems on these processes, and DeepSpeed's JSON as it was read for that."""

    config: Config
    deepspeed: dict[str, Any]  # the JSON of --deepspeed_config; {} without one
    world_size: int
    device: str
    objective: ObjectiveName


def validate(
    config: Config,
    *,
    world_size: int,
    device: str,
    objective: ObjectiveName = "gpt",
    others: Iterable[str] = (),
) -> Validated:
    """Refuse a config that no vocabulary can make valid, before anything slow is started.

    A GPU accepts whatever a CPU accepts: what is wrong with "cuda" is wrong on every device.

    Args:
        objective: what the entry script trains.
        others: problems found elsewhere, to be listed with these.

    Raises:
        ConfigError: lists every problem.
    """
    problems: list[str] = []
    try:
        user = read_ds_config(config.deepspeed.deepspeed_config)
    except ConfigError as error:
        problems += error.problems
        user = {}
    problems += _problems(config, user, world_size=world_size, device=device)
    problems += objective_problems(config, objective)
    problems += _objective_curriculum_problems(config, user, objective)
    raise_if_any([*problems, *others])
    return Validated(
        config=config, deepspeed=user, world_size=world_size, device=device, objective=objective
    )


def _problems(
    config: Config, user: dict[str, Any], *, world_size: int, device: str
) -> Iterator[str]:
    parallel, zero_stage = config.parallel, plan_division(config, user).asked_stage
    tensor = max(1, parallel.tensor_model_parallel_size)
    yield from model_problems(config.model, tensor=tensor)
    yield from lora_problems(
        config.lora, num_experts=config.experts.num_experts, bitfit=config.optimizer.bitfit
    )
    yield from parallel_problems(
        parallel,
        world_size=world_size,
        num_layers=config.model.num_layers,
        zero_stage=zero_stage,
    )
    yield from sequence_problems(
        parallel,
        seq_length=config.model.seq_length,
        num_attention_heads=config.model.num_attention_heads,
        num_groups=num_query_groups_of(config.model),
    )
    yield from kernels_problems(config.kernels, config.model, config.precision, device=device)
    yield from precision_problems(config.precision, device=device)
    yield from optimizer_problems(config.optimizer, device=device)
    yield from data_problems(config.data)
    yield from evaluation_problems(config, zero_stage=zero_stage)
    yield from checkpoint_problems(config.checkpoint, user, zero_stage=zero_stage)
    yield from logging_problems(config, world_size=world_size, device=device, zero_stage=zero_stage)
    yield from watch_problems(config)
    trains = not plan_evaluation(config.evaluation).only
    yield from chaos_problems(config.training, config.checkpoint, trains=trains)
    yield from guards_problems(config.guards, config.checkpoint)
    if parallel.distributed_backend == "nccl" and device == "cpu":
        yield (
            "--distributed-backend nccl needs GPUs and this run is on CPUs: write gloo, or leave "
            "the flag out"
        )
    yield from recompute_problems(config.recompute)
    yield from plan_activations(config, user, world_size=world_size, device=device).problems
    replicas, left_over = divmod(world_size, replica_size(parallel))
    # The number of processes will be another: what is told must hold for any.
    fewest = max(1, config.experts.moe_expert_parallel_size)
    yield from _step_problems(config, user, fewest if left_over else max(1, replicas))


def _step_problems(config: Config, user: dict[str, Any], data: int) -> Iterator[str]:
    """Yield what is wrong with batches, length and learning rate for `data` replicas."""
    first = list(steps_problems(config, user, data=data))
    yield from first
    if first:
        # What is counted in wrong units has no path that could be checked.
        return
    steps = plan_steps(config, user, data=data)
    batch, training = steps.batch, steps.training
    if training.train_iters < 1:
        yield (
            f"--train-samples {training.train_samples} is less than one global batch of "
            f"{batch.size_at(0)} samples"
        )
        return
    yield from schedule_problems(config.schedule, config.training, plan_rates(config, steps))
    zero, pipeline = plan_division(config, user), config.parallel.pipeline_model_parallel_size
    yield from zero_problems(
        zero,
        config.deepspeed,
        user,
        optimizer=plan_optimizer(config.optimizer, on_cpu=False).name,
        uses_distributed_optimizer=config.optimizer.use_distributed_optimizer,
        precision=plan_precision(config.precision),
        pipeline=pipeline,
        data=data,
    )
    tokens = batch.micro_batch_size * steps.curriculum.start
    yield from expert_problems(config, user, data=data, tokens=tokens, zero=zero)
    owned = owned_keys(config, user, batch)
    yield from ds_config_problems(
        user, owned, batch, config.deepspeed.deepspeed_config, pipeline=pipeline
    )


def _objective_curriculum_problems(
    config: Config, user: dict[str, Any], objective: ObjectiveName
) -> Iterator[str]:
    if curriculum_is_asked(user) and objective != "gpt":
        yield (
            f"{config.deepspeed.deepspeed_config}: curriculum_learning cuts the ends of samples off, "
            "which this objective needs: take the block out of the JSON, or train with "
            "pretrain_gpt.py"
        )
