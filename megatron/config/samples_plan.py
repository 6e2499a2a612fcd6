"""Which samples a run reads, decided without tokenizer and device."""

from dataclasses import dataclass
from itertools import chain

from megatron.common.errors import ConfigError, raise_if_any
from megatron.config.config import Config
from megatron.config.data.data_plan import KIND_OF, DataPlan, data_problems, plan_data
from megatron.config.data.mask_plan import MaskPlan, plan_masks
from megatron.config.data.objective_plan import (
    ObjectiveName,
    ObjectivePlan,
    objective_problems,
    plan_objective,
)
from megatron.config.joint_plan import (
    plan_division,
    plan_steps,
    steps_problems,
)
from megatron.config.optimization.batch_plan import BatchPlan
from megatron.config.optimization.training_plan import (
    TrainingPlan,
)
from megatron.config.parallelism.ds_config import (
    read_ds_config,
)
from megatron.config.parallelism.layout import replica_size
from megatron.config.plan import fewest_processes
from megatron.config.run.evaluation_plan import (
    evaluation_problems,
    plan_evaluation,
)


@dataclass(frozen=True, kw_only=True)
class SamplesPlan:
    """Which samples are read at which step."""

    seq_length: int
    batch: BatchPlan
    training: TrainingPlan
    data: DataPlan
    masks: MaskPlan
    objective: ObjectivePlan


def plan_samples(
    config: Config, *, world_size: int | None, objective: ObjectiveName = "gpt"
) -> SamplesPlan:
    """Decide which samples a run of `world_size` processes reads; the fewest when None.

    Raises:
        ConfigError: lists every problem.
    """
    user = read_ds_config(config.deepspeed.deepspeed_config)
    replica = replica_size(config.parallel)
    replicas = (fewest_processes(config) if world_size is None else world_size) // replica
    if replicas < 1 or (world_size is not None and world_size != replicas * replica):
        raise ConfigError(
            f"--world-size {world_size} is not a multiple of tensor * pipeline * sequence = {replica}"
        )
    raise_if_any(
        chain(
            steps_problems(config, user, data=replicas),
            data_problems(config.data),
            objective_problems(config, objective),
            evaluation_problems(config, zero_stage=plan_division(config, user).asked_stage),
        )
    )
    steps = plan_steps(config, user, data=replicas)
    batch, training = steps.batch, steps.training
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
