"""The samples of a run: which documents it reads and how many samples of them, by step."""

from dataclasses import dataclass, replace
from itertools import chain

from megatron.common.errors import ConfigError, raise_if_any
from megatron.common.extensions import declarations_in, owners
from megatron.common.registry import DATASETS
from megatron.config.checks.start import Start
from megatron.config.checks.steps import length_problems
from megatron.config.config import Config
from megatron.config.data.corpora import DataPlan, plan_data
from megatron.config.data.corpora import with_some_data as _with_some_data
from megatron.config.data.masks import MaskPlan, plan_masks
from megatron.config.data.objective import ObjectiveName, ObjectivePlan
from megatron.config.objectives import declaration_of, objective_problems, plan_objective
from megatron.config.optimization.batch_size import BatchPlan
from megatron.config.optimization.training import TrainingPlan
from megatron.config.parallelism.deepspeed_json import read_ds_config
from megatron.config.parallelism.layout import replica_size, replicas_with_all_experts
from megatron.config.run.evaluation import EvaluationPlan, evaluation_problems, plan_evaluation


def fewest_processes(config: Config) -> int:
    """Return the least number of processes in which every flag of `config` has a meaning."""
    compared = 2 if config.logging.slow_rank_factor else 1
    replicas = replicas_with_all_experts(config.parallel, config.ranks_with_all_experts)
    return replica_size(config.parallel) * replicas * compared


def with_some_data(config: Config, objective: ObjectiveName) -> Config:
    """Return `config`, with a meaningless prefix where it names no data: to plan, not to train."""
    if declaration_of(objective).has_epochs:
        return config
    return replace(config, data=_with_some_data(config.data))


@dataclass(frozen=True, kw_only=True)
class SamplesPlan:
    """Samples of a run by step, without tokenizer and device."""

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
    start = Start(
        config=config,
        deepspeed=user,
        world_size=replicas * replica,
        device="cpu",
        objective=objective,
    )
    raise_if_any(
        chain(
            length_problems(start),
            start.declaration.data_problems(config),
            objective_problems(config, objective),
            evaluation_problems(
                config.evaluation, config.checkpoint, zero_stage=start.zero.given_stage
            ),
        )
    )
    steps = start.steps
    return SamplesPlan(
        seq_length=config.model.seq_length,
        batch=steps.batch,
        training=steps.training,
        data=plan_data_of(start, plan_evaluation(config.evaluation, steps.batch)),
        masks=plan_masks(config.masks),
        objective=plan_objective(config, objective),
    )


def plan_data_of(start: Start, evaluation: EvaluationPlan) -> DataPlan:
    """Return the token files to read, and the number of samples from each."""
    config, steps = start.config, start.steps
    extensions = owners(map(type, config.extensions.values()))
    if any(needs(config) for needs in declarations_in("flags", "needs_complete_run", extensions)):
        # The order of samples depends on their number.
        evaluation = replace(evaluation, only=False)
    data = plan_data(
        config.data,
        train_samples=steps.training.train_samples,
        evaluation_samples=evaluation.samples,
        evaluations=evaluation.number_in(steps.training.train_iters),
        kind=start.declaration.kind,
        cut=start.declaration.cut(config),
    )
    name = config.plugins.dataset or ""
    return replace(data, dataset=name, own_flags=DATASETS.flags_of(name, config.extensions))
