"""Validation of a config: every problem at once, before anything is built."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from megatron.common.errors import ConfigError
from megatron.common.extensions import load_extension, owners
from megatron.common.registry import NETWORKS, OBJECTIVES
from megatron.config.config import Config
from megatron.config.data.objective import ObjectiveName
from megatron.config.network.expert_problems import expert_problems
from megatron.config.network.kernels import (
    compile_problems,
    kernels_problems,
    ring_kernels_problems,
)
from megatron.config.network.lora import lora_problems
from megatron.config.network.model import num_query_groups_of
from megatron.config.network.model_problems import model_problems
from megatron.config.network_contract import (
    Network,
    decoder_stack_problems,
    network_in,
    option_problems,
)
from megatron.config.objectives import Declaration, declaration_of, objective_problems
from megatron.config.optimization.batch_size import BatchPlan
from megatron.config.optimization.curriculum import curriculum_problems, has_curriculum
from megatron.config.optimization.lr_schedule import (
    SchedulePlan,
    plan_schedule,
    schedule_problems,
    unit_problems,
)
from megatron.config.optimization.optimizer import optimizer_problems, plan_optimizer
from megatron.config.optimization.training import StepsPlan, plan_steps, step_problems
from megatron.config.parallelism.deepspeed_json import (
    Twin,
    ds_config_problems,
    read_ds_config,
    step_twins,
)
from megatron.config.parallelism.layout import (
    interleaving_problems,
    padded_length,
    parallel_problems,
    plan_parallel,
    replica_size,
    replicas_with_all_experts,
    sequence_parts,
    sequence_problems,
    split_backward_problems,
    uses_ring,
    world_size_problems,
)
from megatron.config.parallelism.precision import (
    fp8_problems,
    plan_precision,
    precision_problems,
    precision_twins,
)
from megatron.config.parallelism.recompute import Storage, plan_storage, recompute_problems
from megatron.config.parallelism.zero import ZeroPlan, plan_zero, zero_problems, zero_twins
from megatron.config.parsing.json_tree import value_at
from megatron.config.plugins import hooks_of_sections, plugin_problems
from megatron.config.run.checkpoint import checkpoint_problems
from megatron.config.run.evaluation import evaluation_problems, plan_evaluation
from megatron.config.run.guards import guards_problems
from megatron.config.run.logging import logging_problems
from megatron.config.run.watchdog import watch_problems


@dataclass(frozen=True, kw_only=True)
class Validated:
    """A config without problems on these processes, and what was resolved to find that out."""

    config: Config
    deepspeed: dict[str, Any]  # the JSON of --deepspeed_config; {} without one
    world_size: int
    device: str
    objective: ObjectiveName
    network: Network
    zero: ZeroPlan
    storage: Storage
    steps: StepsPlan
    schedule: SchedulePlan


def validate(
    config: Config,
    *,
    world_size: int,
    device: str,
    objective: ObjectiveName = "gpt",
    consumed_samples: int = 0,
    others: Iterable[str] = (),
) -> Validated:
    """Refuse a config that no vocabulary can make valid, before anything slow is started.

    A GPU accepts whatever a CPU accepts: what is wrong with "cuda" is wrong on every device.

    Args:
        world_size: processes that are started; under --elastic perhaps not all of them train.
        objective: what the entry script trains.
        consumed_samples: those of the checkpoint that the run resumes from.
        others: problems found elsewhere, to be listed with these.

    Raises:
        ConfigError: lists every problem.
    """
    user, problems = _deepspeed_json(config)
    if config.parallel.elastic:
        problems += _elastic_problems(config, user, world_size=world_size)
        world_size = _elastic_size(
            config,
            user,
            world_size,
            device=device,
            objective=objective,
            consumed_samples=consumed_samples,
        )
    zero = zero_of(config, user)
    network = network_in(config, objective)
    storage = _storage_of(config, user, network, world_size=world_size, device=device)
    data = _replicas_of(config, world_size)
    of_length = [*length_problems(config, user, data=data, consumed_samples=consumed_samples)]
    steps, schedule = (None, None) if of_length else _plan_steps(config, user, data=data)
    problems += _problems(
        config,
        user,
        zero,
        storage,
        steps,
        schedule,
        world_size=world_size,
        device=device,
        num_layers=network.num_layers(config),
        declared=declaration_of(objective),
        consumed_samples=consumed_samples,
    )
    # A schedule counted in wrong units has no path that could be checked.
    problems += of_length
    problems += plugin_problems(partial(_value_of, config, objective), config.extensions)
    problems += chain(_objective_problems(config, user, objective, network), others)
    if not problems:
        problems += option_problems(network, config)
    if problems or steps is None or schedule is None:
        raise ConfigError(*problems)
    return Validated(
        config=config,
        deepspeed=user,
        world_size=world_size,
        device=device,
        objective=objective,
        network=network,
        zero=zero,
        storage=storage,
        steps=steps,
        schedule=schedule,
    )


def _deepspeed_json(config: Config) -> tuple[dict[str, Any], list[str]]:
    """Return the JSON of --deepspeed_config, {} without one, and why it cannot be read."""
    try:
        return read_ds_config(config.deepspeed.deepspeed_config), []
    except ConfigError as error:
        return {}, [*error.problems]


def _elastic_size(
    config: Config,
    user: dict[str, Any],
    started: int,
    *,
    device: str,
    objective: ObjectiveName,
    consumed_samples: int,
) -> int:
    """Return how many of `started` processes train under --elastic: the most that are possible.

    If no number is, the largest that divides the batches: then only the other problems are listed.
    """
    replica = replica_size(config.parallel)
    replicas = range(started // replica, 0, -1)
    sizes = [
        n * replica
        for n in replicas
        if not any(length_problems(config, user, data=n, consumed_samples=consumed_samples))
    ]
    fixed = replace(config, parallel=replace(config.parallel, elastic=False, world_size=None))
    for size in sizes:
        try:
            validate(
                fixed,
                world_size=size,
                device=device,
                objective=objective,
                consumed_samples=consumed_samples,
            )
        except ConfigError:
            continue
        return size
    return max(sizes, default=started)


def _elastic_problems(config: Config, user: dict[str, Any], *, world_size: int) -> Iterator[str]:
    """Yield why a run cannot go on with other numbers of replicas."""
    yield from world_size_problems(config.parallel, world_size)
    if config.training.global_batch_size is None and value_at(user, "train_batch_size") is None:
        yield (
            "--elastic needs --global-batch-size: without it a step has as many samples as the "
            "replicas that there are"
        )
    if plan_optimizer(config.optimizer, on_cpu=False).name == "adam8bit":
        yield (
            "--elastic does not work with --use-bnb-optimizer: Adam's 8-bit state loads into its own "
            "layout only; leave --elastic out"
        )


def _value_of(config: Config, objective: ObjectiveName, section: str, field: str) -> Any:
    if (section, field) == ("plugins", "objective"):
        return objective
    return getattr(getattr(config, section), field)


def _problems(
    config: Config,
    user: dict[str, Any],
    zero: ZeroPlan,
    storage: Storage,
    steps: StepsPlan | None,
    schedule: SchedulePlan | None,
    *,
    world_size: int,
    device: str,
    num_layers: int,
    declared: Declaration,
    consumed_samples: int,
) -> Iterator[str]:
    zero_stage, changes_length = zero.given_stage, has_curriculum(user)
    yield from _network_problems(
        config, world_size=world_size, num_layers=num_layers, zero_stage=zero_stage
    )
    yield from _kernels_problems(config, user, zero_stage, changes_length, device=device)
    yield from optimizer_problems(config.optimizer, device=device)
    yield from declared.data_problems(config)
    yield from _run_problems(config, user, zero_stage, world_size=world_size, device=device)
    yield from recompute_problems(config.recompute)
    yield from storage.problems
    if steps is None:
        return
    if schedule is None:
        yield (
            f"--train-samples {steps.training.train_samples} is less than one global batch of "
            f"{steps.batch.size_at(0)} samples"
        )
    else:
        yield from schedule_problems(config.schedule, config.training, schedule)
        yield from _step_problems(config, user, zero, steps, _replicas_of(config, world_size))
        if not plan_evaluation(config.evaluation).only:
            sizes = steps.batch.sizes_from(consumed_samples)
            yield from interleaving_problems(
                config.parallel, steps.batch, sizes, num_layers=num_layers
            )


def _network_problems(
    config: Config, *, world_size: int, num_layers: int, zero_stage: int
) -> Iterator[str]:
    """Yield what is wrong with the network and its parallel layout."""
    parallel = config.parallel
    tensor = max(1, parallel.tensor_model_parallel_size)
    yield from model_problems(config.model, tensor=tensor)
    yield from lora_problems(
        config.lora, num_experts=config.experts.num_experts, bitfit=config.optimizer.bitfit
    )
    yield from parallel_problems(
        parallel,
        world_size=world_size,
        num_layers=num_layers,
        zero_stage=zero_stage,
    )


def _kernels_problems(
    config: Config,
    user: dict[str, Any],
    zero_stage: int,
    changes_length: bool,
    *,
    device: str,
) -> Iterator[str]:
    """Yield what is wrong with kernels, compilation and precision.

    Args:
        user: DeepSpeed's JSON as it was given.
        changes_length: whether the length of samples changes during the run.
    """
    has_experts = max(config.experts.num_experts or [1]) > 1
    yield from kernels_problems(config.kernels, config.model, config.precision, device=device)
    yield from compile_problems(
        config.kernels,
        model=config.model,
        recompute=config.recompute,
        parallel=config.parallel,
        lora_dropout=config.lora.lora_dropout,
        zero_stage=zero_stage,
        has_experts=has_experts,
        has_curriculum=changes_length,
        device=device,
    )
    yield from split_backward_problems(
        config.parallel,
        {
            "--compile": config.kernels.compile,
            "--fp8-format": config.precision.fp8_format is not None,
            "bf16.immediate_grad_update false in --deepspeed_config": config.precision.bf16
            and not value_at(user, "bf16.immediate_grad_update", True),
        },
    )
    if uses_ring(config.parallel):
        yield from ring_kernels_problems(config.kernels, config.parallel)
    yield from precision_problems(config.precision, device=device)
    yield from fp8_problems(
        config.precision,
        device=device,
        zero_stage=zero_stage,
        has_experts=has_experts,
    )


def _run_problems(
    config: Config, user: dict[str, Any], zero_stage: int, *, world_size: int, device: str
) -> Iterator[str]:
    """Yield what is wrong with evaluation, checkpoints, logging and guards."""
    parallel = config.parallel
    yield from evaluation_problems(config.evaluation, config.checkpoint, zero_stage=zero_stage)
    yield from checkpoint_problems(config.checkpoint, user, zero_stage=zero_stage)
    yield from logging_problems(
        config.logging,
        config.profiling,
        world_size=world_size,
        replicas=world_size // replica_size(parallel),
        with_all_experts=replicas_with_all_experts(
            parallel, config.experts.moe_expert_parallel_size
        ),
        device=device,
        zero_stage=zero_stage,
    )
    yield from watch_problems(config.training, parallel, config.checkpoint)
    trains = not plan_evaluation(config.evaluation).only
    for hook in hooks_of_sections(config.extensions).values():
        yield from hook.problems(config, trains=trains)
    yield from guards_problems(config.guards, config.checkpoint)
    if parallel.distributed_backend == "nccl" and device == "cpu":
        yield (
            "--distributed-backend nccl needs GPUs and this run is on CPUs: write gloo, or leave "
            "the flag out"
        )


def _flags_of_network_problems(config: Config, network: Network) -> Iterator[str]:
    """Yield the flags that the network of an objective does not have, and wrong values of its own."""
    yield from network.problems(config)
    yield from decoder_stack_problems(config, network)
    for extension in owners(map(type, config.extensions.values())):
        load_extension(extension)
    for name in NETWORKS:
        if name != network.name:
            yield from NETWORKS.get_class(name).misplaced(config)


def _replicas_of(config: Config, world_size: int) -> int:
    """Return the number of replicas; of a wrong number of processes the least that is possible."""
    replicas, left_over = divmod(world_size, replica_size(config.parallel))
    expert = config.experts.moe_expert_parallel_size
    least = replicas_with_all_experts(config.parallel, expert) if left_over else replicas
    return max(1, least)


def _plan_steps(
    config: Config, user: dict[str, Any], *, data: int
) -> tuple[StepsPlan, SchedulePlan | None]:
    """Return the steps and the learning-rate schedule, None if there is no step."""
    steps = steps_of(config, user, data=data)
    if steps.training.train_iters < 1:
        return steps, None
    return steps, plan_schedule(config.schedule, steps, seq_length=config.model.seq_length)


def _step_problems(
    config: Config, user: dict[str, Any], zero: ZeroPlan, steps: StepsPlan, data: int
) -> Iterator[str]:
    """Yield what is wrong with ZeRO, experts and DeepSpeed's JSON for `data` replicas."""
    precision, pipeline = (
        plan_precision(config.precision),
        config.parallel.pipeline_model_parallel_size,
    )
    yield from zero_problems(
        zero,
        config.deepspeed,
        user,
        optimizer=plan_optimizer(config.optimizer, on_cpu=False).name,
        uses_distributed_optimizer=config.optimizer.use_distributed_optimizer,
        precision=precision,
        pipeline=pipeline,
        data=data,
    )
    yield from expert_problems(
        config.experts,
        config.parallel,
        config.optimizer,
        user,
        num_layers=config.model.num_layers,
        has_biases=config.model.add_bias_linear,
        dtype=precision.dtype,
        zero_stage=zero.stage,
        data=data,
    )
    yield from ds_config_problems(
        user,
        owned_keys(config, user, zero, steps.batch),
        steps.batch,
        config.deepspeed.deepspeed_config,
        pipeline=pipeline,
    )


def length_problems(
    config: Config, user: dict[str, Any], *, data: int, consumed_samples: int
) -> Iterator[str]:
    """Yield why `data` replicas cannot take the steps of `config`, or not of such sequences."""
    yield from step_problems(config.training, user, data=data, consumed_samples=consumed_samples)
    yield from unit_problems(config.schedule, config.training)
    yield from curriculum_problems(
        user,
        seq_length=config.model.seq_length,
        parts=sequence_parts(config.parallel),
        file=config.deepspeed.deepspeed_config,
    )


def steps_of(config: Config, user: dict[str, Any], *, data: int) -> StepsPlan:
    """Return the steps of `data` replicas, once `length_problems` finds nothing."""
    trains = not (config.evaluation.eval_only or config.evaluation.inference)
    return plan_steps(
        config.training,
        user,
        data=data,
        seq_length=config.model.seq_length,
        saves=trains and config.checkpoint.save is not None,
    )


def zero_of(config: Config, user: dict[str, Any]) -> ZeroPlan:
    """Return ZeRO's stage and offload, from flags and DeepSpeed's JSON."""
    return plan_zero(config.deepspeed, config.optimizer, plan_precision(config.precision), user)


def _storage_of(
    config: Config, user: dict[str, Any], network: Network, *, world_size: int, device: str
) -> Storage:
    """Return how the activations that recomputation keeps are stored."""
    num_layers = network.num_layers(config)
    return plan_storage(
        config.recompute,
        user,
        plan_parallel(config.parallel, world_size=world_size, zero_stage=0, num_layers=num_layers),
        num_layers=num_layers,
        device=device,
    )


def owned_keys(
    config: Config, user: dict[str, Any], zero: ZeroPlan, batch: BatchPlan
) -> list[Twin]:
    """Return the keys of DeepSpeed's JSON that flags own, with their values."""
    return [
        *step_twins(batch=batch, clip_grad=config.optimizer.clip_grad),
        *precision_twins(config.precision, user),
        *zero_twins(zero, config.deepspeed, config.optimizer),
    ]


def _takes_ring(config: Config, network: Network) -> bool:
    """Whether the network can be trained with ring attention."""
    ring = replace(
        config.parallel, context_parallel_size=2, cp_comm_type=None, ds_sequence_parallel_size=1
    )
    problems = network.problems(replace(config, parallel=ring))
    has_experts = max(config.experts.num_experts or [1]) > 1
    return not has_experts and not any("--context-parallel-size" in each for each in problems)


def _objective_problems(
    config: Config, user: dict[str, Any], objective: ObjectiveName, network: Network
) -> Iterator[str]:
    """Yield what is wrong with flags of the objective, its network, dataset and curriculum."""
    yield from objective_problems(config, objective)
    if config.kernels.loss_chunk_tokens and OBJECTIVES.is_own(objective):
        yield (
            f"--loss-chunk-tokens {config.kernels.loss_chunk_tokens}: the loss of a plugin's "
            f"objective ({objective}) gets all logits at once: leave it out"
        )
    declared = declaration_of(objective)
    yield from sequence_problems(
        config.parallel,
        seq_length=config.model.seq_length,
        num_attention_heads=config.model.num_attention_heads,
        num_groups=num_query_groups_of(config.model),
        takes_ring=_takes_ring(config, network),
    )
    length = config.model.seq_length
    if objective != "gpt" and padded_length(config.parallel, length) > length:
        yield (
            f"--context-parallel-size {config.parallel.context_parallel_size}: --seq-length {length} "
            f"is not a multiple of 2 * {config.parallel.context_parallel_size}; samples of the "
            f"objective {objective} cannot be padded"
        )
    yield from _flags_of_network_problems(config, network)
    if config.plugins.dataset and declared.kind != "documents":
        yield f"--dataset {config.plugins.dataset} reads documents, not {declared.kind}"
    if has_curriculum(user) and not declared.takes_short_samples:
        yield (
            f"{config.deepspeed.deepspeed_config}: curriculum_learning cuts the ends of samples off, "
            "which this objective needs: take the block out of the JSON, or train with "
            "pretrain_gpt.py"
        )
