"""Wishes become decisions here, or a list of the reasons why they cannot."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from megatron.config.config import Config
from megatron.config.parallel import ParallelConfig
from megatron.errors import ConfigError, raise_if_any
from megatron.plan.batch_plan import BatchPlan, batch_problems, plan_batch
from megatron.plan.checkpoint_plan import CheckpointPlan, checkpoint_problems, plan_checkpoint
from megatron.plan.curriculum_plan import (
    CurriculumPlan,
    curriculum_is_asked,
    curriculum_problems,
    plan_curriculum,
)
from megatron.plan.data_plan import KIND_OF, DataPlan, data_problems, plan_data
from megatron.plan.ds_config import (
    Twin,
    ds_config_problems,
    merge_ds_config,
    read_ds_config,
    step_twins,
    value_at,
)
from megatron.plan.evaluation_plan import (
    EvaluationPlan,
    evaluation_problems,
    plan_evaluation,
)
from megatron.plan.expert_plan import ExpertPlan, expert_problems, plan_experts
from megatron.plan.kernels_plan import KernelsPlan, kernels_problems, plan_kernels
from megatron.plan.logging_plan import LoggingPlan, logging_problems, plan_logging
from megatron.plan.mask_plan import MaskPlan, plan_masks
from megatron.plan.model_problems import model_problems, vocab_problems
from megatron.plan.model_spec import ModelSpec, num_query_groups_of, plan_model
from megatron.plan.objective_plan import (
    ObjectiveName,
    ObjectivePlan,
    objective_notices,
    objective_problems,
    plan_objective,
)
from megatron.plan.optimizer_plan import OptimizerPlan, optimizer_problems, plan_optimizer
from megatron.plan.parallel_plan import (
    ParallelPlan,
    parallel_notices,
    parallel_problems,
    plan_parallel,
    replica_size,
    sequence_problems,
)
from megatron.plan.precision_plan import (
    PrecisionPlan,
    plan_precision,
    precision_notices,
    precision_problems,
    precision_twins,
)
from megatron.plan.recompute_plan import (
    RecomputePlan,
    Storage,
    plan_recompute,
    plan_storage,
    recompute_problems,
)
from megatron.plan.schedule_plan import SchedulePlan, plan_schedule, schedule_problems
from megatron.plan.training_plan import (
    TrainingPlan,
    plan_training,
    size_problems,
    training_problems,
)
from megatron.plan.zero_plan import ZeroPlan, plan_zero, zero_notices, zero_problems, zero_twins


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that will be built and run. Nothing in it is None."""

    model: ModelSpec
    experts: ExpertPlan
    parallel: ParallelPlan
    batch: BatchPlan
    training: TrainingPlan
    curriculum: CurriculumPlan
    schedule: SchedulePlan
    optimizer: OptimizerPlan
    precision: PrecisionPlan
    data: DataPlan
    masks: MaskPlan
    objective: ObjectivePlan
    evaluation: EvaluationPlan
    checkpoint: CheckpointPlan
    logging: LoggingPlan
    recompute: RecomputePlan
    kernels: KernelsPlan
    deepspeed: dict[str, Any]
    notices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SamplesPlan:
    """Which samples are read at which step: what can be decided without tokenizer and device."""

    seq_length: int
    batch: BatchPlan
    training: TrainingPlan
    data: DataPlan
    masks: MaskPlan
    objective: ObjectivePlan


def check(
    config: Config,
    *,
    world_size: int,
    device: str,
    objective: ObjectiveName = "gpt",
    others: Iterable[str] = (),
) -> None:
    """Refuse wishes that no vocabulary can mend, before anything slow is started.

    Args:
        objective: what the entry script trains.
        others: problems found elsewhere, to be told together with these.

    Raises:
        ConfigError: lists every problem.
    """
    raise_if_any(
        chain(
            _problems(config, world_size=world_size, device=device),
            objective_problems(config, objective),
            _objective_curriculum_problems(config, objective),
            others,
        )
    )


def plan(
    config: Config,
    *,
    world_size: int,
    vocab_size: int,
    device: str,
    objective: ObjectiveName = "gpt",
) -> Plan:
    """Decide what `world_size` processes on `device` ("cpu" or "cuda") will build and run.

    Args:
        vocab_size: number of tokens that the tokenizer knows.
        objective: what the entry script trains.

    Raises:
        ConfigError: lists every problem.
    """
    tensor = config.parallel.tensor_model_parallel_size
    in_vocabulary = vocab_problems(config.tokenizer, vocab_size=vocab_size, tensor=tensor)
    check(
        config,
        world_size=world_size,
        device=device,
        objective=objective,
        others=in_vocabulary,
    )

    user = read_ds_config(config.deepspeed.deepspeed_config)
    precision = plan_precision(config.precision)
    zero = _plan_zero(config, user)
    optimizer = plan_optimizer(config.optimizer, on_cpu=zero.optimizer_device != "none")
    parallel = plan_parallel(
        config.parallel,
        world_size=world_size,
        zero_stage=zero.stage,
        expert=config.experts.moe_expert_parallel_size,
    )
    batch = _plan_batch(config, user, parallel.data)
    curriculum = plan_curriculum(user, config.model.seq_length)
    training = plan_training(config.training, batch, curriculum)
    evaluation = plan_evaluation(config.evaluation)
    model = plan_model(
        config.model, config.tokenizer, config.experts, vocab_size=vocab_size, tensor=tensor
    )
    raise_if_any(size_problems(config.training, model.num_parameters))
    learned = plan_objective(config, objective)
    storage = _plan_storage(config, user, world_size=world_size, device=device)
    return Plan(
        model=model,
        experts=plan_experts(config.experts),
        parallel=parallel,
        batch=batch,
        training=training,
        curriculum=curriculum,
        schedule=_plan_schedule(config, training, batch),
        optimizer=optimizer,
        precision=precision,
        data=plan_data(
            config, training, evaluation, batch.global_batch_size, kind=KIND_OF[objective]
        ),
        masks=plan_masks(config.masks),
        objective=learned,
        evaluation=evaluation,
        checkpoint=plan_checkpoint(config.checkpoint, trains=not evaluation.only),
        logging=plan_logging(config.logging, config.profiling),
        recompute=plan_recompute(
            config.recompute, num_layers=config.model.num_layers, pipeline=parallel.pipeline
        ),
        kernels=plan_kernels(config),
        deepspeed=merge_ds_config(
            user,
            _twins(config, user, batch),
            zero_stage=zero.stage,
            dtype=precision.dtype,
            fp32_gradients=precision.fp32_gradients,
            compiles_optimizer=optimizer.impl == "deepspeed",
            activation_checkpointing=storage.block,
            divides_sequence=parallel.pipeline > 1 and parallel.sequence_parallel,
        ),
        notices=tuple(
            chain(
                _notices(config, user, zero),
                objective_notices(learned),
                parallel_notices(config.parallel),
                storage.notices,
            )
        ),
    )


def plan_samples(
    config: Config, *, world_size: int | None, objective: ObjectiveName = "gpt"
) -> SamplesPlan:
    """Decide which samples a run of `world_size` processes reads; one replica when None.

    Raises:
        ConfigError: lists every problem.
    """
    user = read_ds_config(config.deepspeed.deepspeed_config)
    replica = replica_size(config.parallel)
    replicas = 1 if world_size is None else world_size // replica
    if replicas < 1 or (world_size is not None and world_size != replicas * replica):
        raise ConfigError(
            f"--world-size {world_size} is not a multiple of tensor * pipeline * sequence = {replica}"
        )
    raise_if_any(
        chain(
            batch_problems(
                config.training,
                global_batch_size=_global_batch_size(config, user),
                data_parallel_size=replicas,
            ),
            training_problems(config.training, config.schedule),
            data_problems(config.data),
            objective_problems(config, objective),
            evaluation_problems(config, zero_stage=_plan_zero(config, user).asked_stage),
            curriculum_problems(
                user,
                seq_length=config.model.seq_length,
                parts=_parts_of_samples(config.parallel),
                file=config.deepspeed.deepspeed_config,
            ),
        )
    )
    batch = _plan_batch(config, user, replicas)
    curriculum = plan_curriculum(user, config.model.seq_length)
    training = plan_training(config.training, batch, curriculum)
    return SamplesPlan(
        seq_length=config.model.seq_length,
        batch=batch,
        training=training,
        data=plan_data(
            config,
            training,
            plan_evaluation(config.evaluation),
            batch.global_batch_size,
            kind=KIND_OF[objective],
        ),
        masks=plan_masks(config.masks),
        objective=plan_objective(config, objective),
    )


def _problems(config: Config, *, world_size: int, device: str) -> Iterator[str]:
    try:
        user = read_ds_config(config.deepspeed.deepspeed_config)
    except ConfigError as error:
        yield from error.problems
        user = {}
    parallel = config.parallel
    tensor = max(1, parallel.tensor_model_parallel_size)
    yield from model_problems(config.model, tensor=tensor)
    yield from parallel_problems(
        parallel,
        world_size=world_size,
        num_layers=config.model.num_layers,
        zero_stage=_plan_zero(config, user).asked_stage,
    )
    yield from sequence_problems(
        parallel,
        seq_length=config.model.seq_length,
        num_attention_heads=config.model.num_attention_heads,
        num_groups=num_query_groups_of(config.model),
    )
    yield from kernels_problems(config, device=device)
    yield from precision_problems(config.precision, device=device)
    yield from optimizer_problems(config.optimizer, device=device)
    yield from data_problems(config.data)
    yield from evaluation_problems(config, zero_stage=_plan_zero(config, user).asked_stage)
    yield from checkpoint_problems(
        config.checkpoint, zero_stage=_plan_zero(config, user).asked_stage
    )
    yield from logging_problems(config, world_size=world_size, device=device)
    if parallel.distributed_backend == "nccl" and device == "cpu":
        yield (
            "--distributed-backend nccl needs GPUs and this run is on CPUs: write gloo, or leave "
            "the flag out"
        )
    yield from recompute_problems(config.recompute)
    yield from _plan_storage(config, user, world_size=world_size, device=device).problems
    yield from _step_problems(config, user, max(1, world_size // replica_size(parallel)))


def _step_problems(config: Config, user: dict[str, Any], data: int) -> Iterator[str]:
    """Yield what is wrong with batches, length and learning rate for `data` replicas."""
    first = [
        *batch_problems(
            config.training,
            global_batch_size=_global_batch_size(config, user),
            data_parallel_size=data,
        ),
        *training_problems(config.training, config.schedule),
        *curriculum_problems(
            user,
            seq_length=config.model.seq_length,
            parts=_parts_of_samples(config.parallel),
            file=config.deepspeed.deepspeed_config,
        ),
    ]
    yield from first
    if first:
        # What is counted in wrong units has no path that could be checked.
        return
    batch = _plan_batch(config, user, data)
    curriculum = plan_curriculum(user, config.model.seq_length)
    training = plan_training(config.training, batch, curriculum)
    if training.train_iters < 1:
        yield (
            f"--train-samples {training.train_samples} is less than one global batch of "
            f"{batch.size_at(0)} samples"
        )
        return
    yield from schedule_problems(config.schedule, _plan_schedule(config, training, batch))
    zero, pipeline = _plan_zero(config, user), config.parallel.pipeline_model_parallel_size
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
    tokens = batch.micro_batch_size * curriculum.start
    yield from expert_problems(config, user, data=data, tokens=tokens, zero=zero)
    owned = _twins(config, user, batch)
    yield from ds_config_problems(
        user,
        owned,
        batch,
        config.deepspeed.deepspeed_config,
        pipeline=pipeline,
    )


def _parts_of_samples(parallel: ParallelConfig) -> int:
    """Return the number that the tokens of a sample must be a multiple of."""
    tensor = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    return max(1, tensor) * max(1, parallel.ds_sequence_parallel_size)


def _objective_curriculum_problems(config: Config, objective: ObjectiveName) -> Iterator[str]:
    file = config.deepspeed.deepspeed_config
    try:
        asked = curriculum_is_asked(read_ds_config(file))
    except ConfigError:
        # Told with the other problems of the file.
        return
    if asked and objective != "gpt":
        yield (
            f"{file}: curriculum_learning cuts the ends of samples off, which this objective needs: "
            "take the block out of the JSON, or train with pretrain_gpt.py"
        )


def _plan_batch(config: Config, user: dict[str, Any], data: int) -> BatchPlan:
    return plan_batch(
        config.training,
        global_batch_size=_global_batch_size(config, user),
        data_parallel_size=data,
    )


def _plan_schedule(config: Config, training: TrainingPlan, batch: BatchPlan) -> SchedulePlan:
    return plan_schedule(config.schedule, training, batch, seq_length=config.model.seq_length)


def _plan_zero(config: Config, user: dict[str, Any]) -> ZeroPlan:
    precision = plan_precision(config.precision)
    return plan_zero(config.deepspeed, config.optimizer, user, is_mixed=precision.is_mixed)


def _twins(config: Config, user: dict[str, Any], batch: BatchPlan) -> list[Twin]:
    return [
        *step_twins(batch=batch, clip_grad=config.optimizer.clip_grad),
        *precision_twins(config.precision, user),
        *zero_twins(_plan_zero(config, user), config.deepspeed, config.optimizer),
    ]


def _plan_storage(config: Config, user: dict[str, Any], *, world_size: int, device: str) -> Storage:
    return plan_storage(
        config.recompute,
        user,
        plan_parallel(config.parallel, world_size=world_size, zero_stage=0),
        num_layers=config.model.num_layers,
        device=device,
    )


def _global_batch_size(config: Config, user: dict[str, Any]) -> int | None:
    if config.training.global_batch_size is not None:
        return config.training.global_batch_size
    return value_at(user, "train_batch_size")


def _notices(config: Config, user: dict[str, Any], zero: ZeroPlan) -> Iterator[str]:
    yield from precision_notices(config.precision, user)
    yield from zero_notices(zero, config.optimizer)
    if "optimizer" in user:
        yield "the optimizer block of the DeepSpeed JSON is not used: --optimizer and its flags decide"
