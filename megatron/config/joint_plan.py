"""Decisions that take several sections and DeepSpeed's JSON, for all who need them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.config.config import Config
from megatron.config.optimization.batch_plan import BatchPlan, batch_problems, plan_batch
from megatron.config.optimization.curriculum_plan import (
    CurriculumPlan,
    curriculum_problems,
    plan_curriculum,
)
from megatron.config.optimization.schedule_plan import SchedulePlan, plan_schedule
from megatron.config.optimization.training_plan import (
    TrainingPlan,
    plan_training,
    training_problems,
)
from megatron.config.parallelism.ds_config import Twin, step_twins, value_at
from megatron.config.parallelism.layout import ParallelConfig, plan_parallel
from megatron.config.parallelism.precision_plan import plan_precision, precision_twins
from megatron.config.parallelism.recompute import Storage, plan_storage
from megatron.config.parallelism.zero_plan import ZeroPlan, plan_zero, zero_twins


@dataclass(frozen=True, kw_only=True)
class StepsPlan:
    """How many steps a run takes, and on what."""

    batch: BatchPlan
    curriculum: CurriculumPlan
    training: TrainingPlan


def plan_steps(config: Config, user: dict[str, Any], *, data: int) -> StepsPlan:
    """Return what `data` replicas do in a step and how often.

    Args:
        user: DeepSpeed's JSON.
    """
    batch = plan_batch(
        config.training,
        global_batch_size=_global_batch_size(config, user),
        data_parallel_size=data,
    )
    curriculum = plan_curriculum(user, config.model.seq_length)
    trains = not (config.evaluation.eval_only or config.evaluation.inference)
    saves = trains and config.checkpoint.save is not None
    training = plan_training(config.training, batch, curriculum, saves=saves)
    return StepsPlan(batch=batch, curriculum=curriculum, training=training)


def steps_problems(config: Config, user: dict[str, Any], *, data: int) -> Iterator[str]:
    """Yield every reason why `data` replicas cannot take steps as asked."""
    yield from batch_problems(
        config.training,
        global_batch_size=_global_batch_size(config, user),
        data_parallel_size=data,
    )
    yield from training_problems(config.training, config.schedule)
    yield from curriculum_problems(
        user,
        seq_length=config.model.seq_length,
        parts=_parts_of_samples(config.parallel),
        file=config.deepspeed.deepspeed_config,
    )


def plan_rates(config: Config, steps: StepsPlan) -> SchedulePlan:
    """Return the path of the learning rate over `steps`."""
    return plan_schedule(
        config.schedule,
        steps.training,
        steps.batch,
        steps.curriculum,
        seq_length=config.model.seq_length,
    )


def plan_division(config: Config, user: dict[str, Any]) -> ZeroPlan:
    """Return what ZeRO divides, with what `user`, DeepSpeed's JSON, says of it."""
    precision = plan_precision(config.precision)
    return plan_zero(config.deepspeed, config.optimizer, user, is_mixed=precision.is_mixed)


def owned_keys(config: Config, user: dict[str, Any], batch: BatchPlan) -> list[Twin]:
    """Return the keys of DeepSpeed's JSON that flags own, with their values."""
    return [
        *step_twins(batch=batch, clip_grad=config.optimizer.clip_grad),
        *precision_twins(config.precision, user),
        *zero_twins(plan_division(config, user), config.deepspeed, config.optimizer),
    ]


def plan_activations(
    config: Config, user: dict[str, Any], *, world_size: int, device: str
) -> Storage:
    """Return how what recomputation keeps is stored."""
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


def _parts_of_samples(parallel: ParallelConfig) -> int:
    """Return the number that the tokens of a sample must be a multiple of."""
    tensor = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    return max(1, tensor) * max(1, parallel.ds_sequence_parallel_size)
