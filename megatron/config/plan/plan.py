"""The plan: every field of a run resolved from its config, or a list of the reasons why it cannot be."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron.common.errors import raise_if_any
from megatron.common.registry import OBJECTIVES
from megatron.config.architecture.partition import entries_of_rank, stage_problems
from megatron.config.checks.start import Start
from megatron.config.config import Config
from megatron.config.data.corpora import DataPlan
from megatron.config.data.masks import MaskPlan, plan_masks
from megatron.config.data.objective import ObjectiveName, ObjectivePlan
from megatron.config.data.tokenizer import vocab_problems
from megatron.config.model_plan import plan_model
from megatron.config.network.experts import ExpertPlan, plan_experts
from megatron.config.network.kernels import plan_kernels
from megatron.config.network.model_problems import fp8_size_problems
from megatron.config.network.model_spec import ModelSpec, flat
from megatron.config.objectives import plan_objective
from megatron.config.optimization.batch_size import BatchPlan
from megatron.config.optimization.curriculum import CurriculumPlan
from megatron.config.optimization.lr_schedule import SchedulePlan
from megatron.config.optimization.optimizer import OptimizerPlan
from megatron.config.optimization.training import TrainingPlan, size_problems
from megatron.config.parallelism.deepspeed_json import bucket_size, merge_ds_config
from megatron.config.parallelism.kernels_plan import KernelsPlan
from megatron.config.parallelism.layout import ParallelPlan, plan_parallel
from megatron.config.parallelism.precision import PrecisionPlan
from megatron.config.parallelism.recompute import plan_recompute
from megatron.config.parallelism.recompute_plan import RecomputePlan
from megatron.config.plan.samples import plan_data_of
from megatron.config.plan.validation import plan_notices, validate
from megatron.config.plugins import PluginPlan, plan_plugins
from megatron.config.run.checkpoint import CheckpointPlan, plan_checkpoint
from megatron.config.run.evaluation import EvaluationPlan, plan_evaluation
from megatron.config.run.guards import GuardsPlan, plan_guards
from megatron.config.run.logging import LoggingPlan, plan_logging
from megatron.config.run.watchdog import WatchPlan, plan_watch


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that will be built and run. None is a part that the run does not have."""

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
    watch: WatchPlan
    guards: GuardsPlan
    recompute: RecomputePlan
    kernels: KernelsPlan
    plugins: PluginPlan
    deepspeed: dict[str, Any]
    notices: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as manifests have it: nested dictionaries, the network as a flat one."""
        return asdict(self) | {"model": flat(self.model)}


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
    start = validate(
        config,
        world_size=world_size,
        device=device,
        objective=objective,
        others=vocab_problems(config.tokenizer, vocab_size=vocab_size),
    )
    return _resolve(start, vocab_size)


def resolve(start: Start, *, vocab_size: int) -> Plan:
    """Return the plan of a validated config for a tokenizer of `vocab_size` tokens.

    Raises:
        ConfigError: lists every problem of the vocabulary.
    """
    raise_if_any(vocab_problems(start.config.tokenizer, vocab_size=vocab_size))
    return _resolve(start, vocab_size)


def _resolve(start: Start, vocab_size: int) -> Plan:
    config, steps = start.config, start.steps
    parallel = plan_parallel(
        config.parallel,
        world_size=start.world_size,
        zero_stage=start.zero.stage,
        num_layers=start.num_layers,
        expert=config.experts.moe_expert_parallel_size,
        ranks_per_expert=config.ranks_per_expert,
    )
    deepspeed = _merge_ds_config(start, parallel)
    if _overlaps_reduction(start, parallel):
        parallel = replace(parallel, bucket_size=bucket_size(deepspeed))
    evaluation = plan_evaluation(config.evaluation, steps.batch)
    model = plan_model(
        config, vocab_size=vocab_size, tensor=parallel.tensor, objective=start.objective
    )
    _require_fitting_network(start, model, parallel)
    objective = plan_objective(config, start.objective)
    own_flags = OBJECTIVES.flags_of(start.objective, config.extensions)
    return Plan(
        model=model,
        experts=plan_experts(config.experts),
        parallel=parallel,
        batch=steps.batch,
        training=steps.training,
        curriculum=steps.curriculum,
        schedule=start.schedule,
        optimizer=start.optimizer,
        precision=start.precision,
        data=plan_data_of(start, evaluation),
        masks=plan_masks(config.masks),
        objective=replace(objective, own_flags=own_flags),
        evaluation=evaluation,
        checkpoint=plan_checkpoint(config.checkpoint, trains=start.trains),
        logging=plan_logging(config.logging, config.profiling),
        watch=plan_watch(
            config.training,
            config.parallel,
            config.checkpoint,
            device=start.device,
            world_size=start.world_size,
        ),
        guards=plan_guards(config.guards),
        recompute=plan_recompute(
            config.recompute,
            num_layers=start.num_layers,
            pipeline=parallel.pipeline * parallel.chunks,
        ),
        kernels=plan_kernels(config.kernels, config.model, config.precision),
        plugins=plan_plugins(config.plugins, config.extensions),
        deepspeed=deepspeed,
        notices=(
            *plan_notices(start, model.vocabulary.padded_vocab_size, objective),
            *start.storage.notices,
        ),
    )


def _require_fitting_network(start: Start, model: ModelSpec, parallel: ParallelPlan) -> None:
    """Refuse a network that is too small for its ranks, its stages or its dtype.

    Raises:
        ConfigError: lists the problems of the first kind.
    """
    config, tensor = start.config, parallel.tensor
    raise_if_any(size_problems(config.training, model.num_parameters))
    entries = entries_of_rank(start.network, model, parallel, mixed=start.precision.is_mixed)
    numbers = [entry.number for entry in entries if entry.kind == "block"]
    trained = {"--bitfit": numbers} if start.optimizer.biases_only else {}
    if (lora := model.lora) is not None:
        targets, layers_of = {*lora.lora_target_modules}, start.network.linear_layers
        trained[lora.flags] = [each for each in numbers if targets & {*layers_of(model, each)}]
    raise_if_any(stage_problems(parallel, entries, trained))
    raise_if_any(fp8_size_problems(config.precision, model, tensor=tensor))


def _merge_ds_config(start: Start, parallel: ParallelPlan) -> dict[str, Any]:
    """Return the JSON for DeepSpeed: the user's with the keys that flags own."""
    precision = start.precision
    return merge_ds_config(
        start.deepspeed,
        start.owned_keys,
        zero_stage=start.zero.stage,
        dtype=precision.dtype,
        fp32_gradients=precision.fp32_gradients,
        compiles_optimizer=start.optimizer.impl == "deepspeed",
        activation_checkpointing=start.storage.block,
        divides_sequence=parallel.pipeline > 1 and parallel.sequence_parallel,
        pipeline=parallel.pipeline,
        overlaps_reduction=_overlaps_reduction(start, parallel),
    )


def _overlaps_reduction(start: Start, parallel: ParallelPlan) -> bool:
    copies = max(parallel.data * parallel.sequence, parallel.copies_of_experts)
    return copies > 1 and not start.zero.offloads
