"""The plan: every field of a run resolved from its config, or a list of the reasons why it cannot be."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

from megatron.common.errors import ConfigError, raise_if_any
from megatron.common.extensions import declared_with
from megatron.common.registry import (
    ACTIVATIONS,
    ATTENTIONS,
    DATASETS,
    NETWORKS,
    NORMS,
    OBJECTIVES,
    OPTIMIZERS,
    POSITION_EMBEDDINGS,
    SCHEDULES,
)
from megatron.config.config import Config
from megatron.config.data.corpora import DataPlan, plan_data
from megatron.config.data.corpora import with_some_data as _with_some_data
from megatron.config.data.masks import MaskPlan, plan_masks
from megatron.config.data.objective import ObjectiveName, ObjectivePlan
from megatron.config.data.tokenizer import vocab_notices, vocab_problems
from megatron.config.network.expert_plan import ExpertPlan
from megatron.config.network.experts import plan_experts
from megatron.config.network.kernels import plan_kernels
from megatron.config.network.model_problems import fp8_size_problems
from megatron.config.network.model_spec import ModelSpec, flat
from megatron.config.networks.network import plain_spec
from megatron.config.networks.partition import stage_problems
from megatron.config.objectives import (
    declaration_of,
    objective_notices,
    objective_problems,
    plan_objective,
)
from megatron.config.optimization.batch_size import BatchPlan
from megatron.config.optimization.curriculum import CurriculumPlan
from megatron.config.optimization.lr_schedule import SchedulePlan
from megatron.config.optimization.optimizer import OptimizerPlan, plan_optimizer
from megatron.config.optimization.training import StepsPlan, TrainingPlan, size_problems
from megatron.config.parallelism.deepspeed_json import merge_ds_config, read_ds_config
from megatron.config.parallelism.deepspeed_keys import key_notices
from megatron.config.parallelism.kernels_plan import KernelsPlan
from megatron.config.parallelism.layout import (
    ParallelPlan,
    parallel_notices,
    plan_parallel,
    replica_size,
    replicas_with_all_experts,
    uses_ring,
)
from megatron.config.parallelism.precision import (
    PrecisionPlan,
    plan_precision,
    precision_notices,
)
from megatron.config.parallelism.recompute import plan_recompute, recompute_notices
from megatron.config.parallelism.recompute_plan import RecomputePlan
from megatron.config.parallelism.zero import zero_notices
from megatron.config.plugins import PluginPlan, plan_plugins
from megatron.config.run.checkpoint import CheckpointPlan, checkpoint_notices, plan_checkpoint
from megatron.config.run.evaluation import EvaluationPlan, evaluation_problems, plan_evaluation
from megatron.config.run.guards import GuardsPlan, plan_guards
from megatron.config.run.logging import LoggingPlan, plan_logging
from megatron.config.run.watchdog import WatchPlan, plan_watch
from megatron.config.validation import (
    Validated,
    length_problems,
    network_in,
    owned_keys,
    steps_of,
    validate,
    zero_of,
)


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
    valid = validate(
        config,
        world_size=world_size,
        device=device,
        objective=objective,
        others=vocab_problems(config.tokenizer, vocab_size=vocab_size),
    )
    return _resolve(valid, vocab_size)


def resolve(valid: Validated, *, vocab_size: int) -> Plan:
    """Return the plan of a validated config for a tokenizer of `vocab_size` tokens.

    Raises:
        ConfigError: lists every problem of the vocabulary.
    """
    raise_if_any(vocab_problems(valid.config.tokenizer, vocab_size=vocab_size))
    return _resolve(valid, vocab_size)


def _resolve(valid: Validated, vocab_size: int) -> Plan:
    config, steps = valid.config, valid.steps
    optimizer = plan_optimizer(config.optimizer, on_cpu=valid.zero.optimizer_device != "none")
    parallel = plan_parallel(
        config.parallel,
        world_size=valid.world_size,
        zero_stage=valid.zero.stage,
        num_layers=valid.network.num_layers(config),
        expert=config.experts.moe_expert_parallel_size,
    )
    evaluation = plan_evaluation(config.evaluation)
    model = plan_model(
        config, vocab_size=vocab_size, tensor=parallel.tensor, objective=valid.objective
    )
    raise_if_any(size_problems(config.training, model.num_parameters))
    entries = valid.network.entries(model, tensor=parallel.tensor, expert=parallel.expert)
    layers_only = {
        "--lora-rank": model.lora is not None,
        "--bitfit": optimizer.biases_only,
        "--optimizer muon": optimizer.name == "muon",
    }
    raise_if_any(stage_problems(parallel, entries, layers_only))
    raise_if_any(fp8_size_problems(config.precision, model, tensor=parallel.tensor))
    objective = plan_objective(config, valid.objective)
    own_flags = config.extensions
    return Plan(
        model=model,
        experts=plan_experts(config.experts),
        parallel=parallel,
        batch=steps.batch,
        training=steps.training,
        curriculum=steps.curriculum,
        schedule=replace(
            valid.schedule,
            own_flags=SCHEDULES.flags_of(config.schedule.lr_decay_style, own_flags),
        ),
        optimizer=replace(
            optimizer, own_flags=OPTIMIZERS.flags_of(config.optimizer.optimizer, own_flags)
        ),
        precision=plan_precision(config.precision),
        data=_plan_data(config, valid.objective, steps, evaluation),
        masks=plan_masks(config.masks),
        objective=replace(objective, own_flags=OBJECTIVES.flags_of(valid.objective, own_flags)),
        evaluation=evaluation,
        checkpoint=plan_checkpoint(config.checkpoint, trains=not evaluation.only),
        logging=plan_logging(config.logging, config.profiling),
        watch=plan_watch(
            config.training,
            config.parallel,
            config.checkpoint,
            device=valid.device,
            world_size=valid.world_size,
        ),
        guards=plan_guards(config.guards),
        recompute=plan_recompute(
            config.recompute,
            num_layers=valid.network.num_layers(config),
            pipeline=parallel.pipeline * parallel.chunks,
        ),
        kernels=plan_kernels(config.kernels, config.model, config.precision),
        plugins=plan_plugins(config.plugins, config.extensions),
        deepspeed=_merge_ds_config(valid, parallel, optimizer),
        notices=(
            *_notices(valid, model.vocabulary.padded_vocab_size, objective),
            *valid.storage.notices,
        ),
    )


def _merge_ds_config(
    valid: Validated, parallel: ParallelPlan, optimizer: OptimizerPlan
) -> dict[str, Any]:
    """Return the JSON for DeepSpeed: the user's with the keys that flags own."""
    precision = plan_precision(valid.config.precision)
    return merge_ds_config(
        valid.deepspeed,
        owned_keys(valid.config, valid.deepspeed, valid.zero, valid.steps.batch),
        zero_stage=valid.zero.stage,
        dtype=precision.dtype,
        fp32_gradients=precision.fp32_gradients,
        compiles_optimizer=optimizer.impl == "deepspeed",
        activation_checkpointing=valid.storage.block,
        divides_sequence=parallel.pipeline > 1 and parallel.sequence_parallel,
        pipeline=parallel.pipeline,
        overlaps_reduction=parallel.data * parallel.sequence > 1 and not valid.zero.offloads,
    )


def plan_model(
    config: Config, *, vocab_size: int, tensor: int, objective: ObjectiveName = "gpt"
) -> ModelSpec:
    """Return the network of `config` for a tokenizer of `vocab_size` tokens."""
    network = network_in(config, objective)
    spec = network.spec(plain_spec(config, vocab_size=vocab_size, tensor=tensor), config)
    kernel = config.kernels.attention_impl
    attention = replace(spec.attention, attention=kernel if ATTENTIONS.is_own(kernel) else "")
    own = (
        *NETWORKS.flags_of(network.name, config.extensions),
        *POSITION_EMBEDDINGS.flags_of(spec.positions.position_embedding, config.extensions),
        *ACTIVATIONS.flags_of(spec.mlp.activation, config.extensions),
        *NORMS.flags_of(spec.norm.normalization, config.extensions),
        *ATTENTIONS.flags_of(attention.attention, config.extensions),
    )
    return replace(spec, attention=attention, own_flags=tuple(dict.fromkeys(own)))


def fewest_processes(config: Config) -> int:
    """Return the least number of processes in which every flag of `config` has a meaning."""
    compared = 2 if config.logging.slow_rank_factor else 1
    expert = config.experts.moe_expert_parallel_size
    replicas = replicas_with_all_experts(config.parallel, expert)
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
    raise_if_any(
        chain(
            length_problems(config, user, data=replicas, consumed_samples=0),
            declaration_of(objective).data_problems(config),
            objective_problems(config, objective),
            evaluation_problems(
                config.evaluation,
                config.checkpoint,
                zero_stage=zero_of(config, user).given_stage,
            ),
        )
    )
    steps = steps_of(config, user, data=replicas)
    return SamplesPlan(
        seq_length=config.model.seq_length,
        batch=steps.batch,
        training=steps.training,
        data=_plan_data(config, objective, steps, plan_evaluation(config.evaluation)),
        masks=plan_masks(config.masks),
        objective=plan_objective(config, objective),
    )


def _plan_data(
    config: Config, objective: ObjectiveName, steps: StepsPlan, evaluation: EvaluationPlan
) -> DataPlan:
    if any(needs(config) for needs in declared_with(config.extensions, "needs_complete_run")):
        # The order of samples depends on their number.
        evaluation = replace(evaluation, only=False)
    data = plan_data(
        config.data,
        train_samples=steps.training.train_samples,
        evaluation_samples=evaluation.iters * steps.batch.global_batch_size,
        evaluations=evaluation.number_in(steps.training.train_iters),
        kind=declaration_of(objective).kind,
        cut=declaration_of(objective).cut(config),
    )
    name = config.plugins.dataset or ""
    return replace(data, dataset=name, own_flags=DATASETS.flags_of(name, config.extensions))


def _notices(valid: Validated, padded_vocab_size: int, objective: ObjectivePlan) -> Iterator[str]:
    config = valid.config
    yield from parallel_notices(config.parallel, seq_length=config.model.seq_length)
    if not declaration_of(valid.objective).has_epochs:
        yield from checkpoint_notices(config.checkpoint)
    yield from precision_notices(config.precision, valid.deepspeed)
    yield from zero_notices(valid.zero, config.optimizer)
    yield from recompute_notices(
        plan_recompute(config.recompute, num_layers=1, pipeline=1),
        attention=plan_kernels(config.kernels, config.model, config.precision).attention,
        device=valid.device,
        ring=uses_ring(config.parallel),
    )
    yield from key_notices(valid.deepspeed)
    if "optimizer" in valid.deepspeed:
        yield "the optimizer block of the DeepSpeed JSON is not used: --optimizer and its flags decide"
    yield from vocab_notices(config.tokenizer, padded=padded_vocab_size)
    yield from objective_notices(objective)
