"""Load a checkpoint for inference: process groups, engine, tokenizer, chat template, FIM tokens."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron.checkpointing.compare import require_same_model, task_in
from megatron.common.errors import (
    ConfigError,
    DataError,
    WrongCheckpointError,
    WrongDataError,
    raise_if_any,
)
from megatron.common.registry import NETWORKS
from megatron.config.architecture.architecture import (
    Architecture,
    Service,
    network_named,
    network_of,
)
from megatron.config.config import Config
from megatron.config.inference.generation import (
    DecodingConfig,
    Dtype,
    GenerationConfig,
    batch_problems,
    candidate_problems,
    dtype_problems,
    inference_dtype,
    layout_problems,
    room_problems,
    vocabulary_problems,
)
from megatron.config.model_plan import plan_model
from megatron.config.network.kernels import plan_kernels
from megatron.config.network.model_spec import ModelSpec, flat
from megatron.config.network_contract import with_network
from megatron.config.objectives import plan_objective
from megatron.config.parallelism.layout import ParallelConfig
from megatron.data.datasets.fim import FimTokens, fim_tokens
from megatron.fused_kernels.reference.dispatch import Kernels
from megatron.fused_kernels.registry import choose_inference_kernels
from megatron.fused_kernels.trials import Trials
from megatron.inference.engine.continuous_batching import InferenceEngine
from megatron.inference.loading.model_source import (
    ModelSource,
    tokenizer_advice,
    tokenizer_arguments_of,
)
from megatron.inference.runner.decode_graphs import decode_capture
from megatron.inference.runner.model_runner import ModelRunner
from megatron.tensor_parallel.dtypes import TORCH_DTYPES
from megatron.tensor_parallel.master_address import MasterAddress
from megatron.tensor_parallel.object_collectives import agree_on_failure
from megatron.tensor_parallel.process_groups import Groups, build_groups, control_group, lone_group
from megatron.tensor_parallel.rendezvous import rendezvous
from megatron.tensor_parallel.topology import Topology
from megatron.tokenizer.build import build_tokenizer, tokenizer_problems
from megatron.tokenizer.chat import read_chat_template
from megatron.tokenizer.chat_prompt import ChatPrompts
from megatron.tokenizer.types.options import keywords
from megatron.tokenizer.types.tokenizer import Tokenizer
from megatron.training.process.device import prepare_process
from megatron.training.process.environment import Launch, cpu_threads, master_address

log = logging.getLogger(__name__)

Runner = TypeVar("Runner")

_COLLECTIVE_TIMEOUT = timedelta(days=365)  # other ranks wait until the next request
_RENDEZVOUS_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model that is ready to generate.

    Args:
        is_first: whether requests are added in this process; others call `InferenceEngine.follow`.
    """

    engine: InferenceEngine
    tokenizer: Tokenizer
    spec: ModelSpec
    is_first: bool


def load_model(
    source: ModelSource,
    options: GenerationConfig,
    *,
    rows: int,
    with_replicas: bool = False,
    services: Sequence[Service] = ("prompts",),
) -> LoadedModel:
    """Load a checkpoint in the layout of the command line.

    Args:
        rows: most sequences at once.
        with_replicas: use further processes for further replicas of the model.
        services: of networks that the caller can use.

    Raises:
        ConfigError: options contradict each other or do not fit the machine.
        CheckpointError: the checkpoint is damaged, or its model differs from the command line's.

    Communication: every rank must call this, in step.
    """
    config, parallel = source.config, source.config.parallel
    tokenizer, spec = tokenizer_and_spec(source)
    network = require_service(source, spec, *services)
    recompute = options.recompute or not network.caches
    launch, device = prepare_process(parallel)
    dtype = inference_dtype(options, config.precision, device=device.type)
    model_size = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    replicas = max(1, launch.world_size // max(1, model_size)) if with_replicas else 1
    problems = [
        *layout_problems(parallel, spec, world_size=launch.world_size, replicas=replicas),
        *room_problems(options, spec, rows=rows),
        *vocabulary_problems(options, vocab_size=spec.vocabulary.vocab_size),
        *dtype_problems(dtype, device=device.type),
        *_stage_problems(parallel, spec),
    ]
    raise_if_any(problems)
    _set_threads(launch, device)
    groups = _inference_groups(parallel, replicas, device, master_address(launch))
    graphs = options.decode_graphs and not network.retrieves
    with source.weights() as full:
        runner = ModelRunner(
            _with_equal_shards(spec, groups),
            full.parameters,
            groups=groups,
            dtype=TORCH_DTYPES[dtype],
            device=device,
            rows=0 if recompute else rows,
            max_length=options.inference_max_seq_length,
            sees_prefix=source.manifest.objective.sees_prefix,
            control=control_group(groups, _COLLECTIVE_TIMEOUT) if groups.model.size() > 1 else None,
            capture=decode_capture(spec, groups, device) if graphs else None,
            kernels=_kernels_of(config, spec, groups, TORCH_DTYPES[dtype], device),
        )
    return LoadedModel(
        engine=_engine_of(runner, options, rows=rows, tokenizer=tokenizer, recompute=recompute),
        tokenizer=tokenizer,
        spec=spec,
        is_first=launch.rank == 0,
    )


def _engine_of(
    runner: ModelRunner,
    options: GenerationConfig,
    *,
    rows: int,
    tokenizer: Tokenizer,
    recompute: bool,
) -> InferenceEngine:
    """Return the engine of a runner with the options of continuous batching.

    Raises:
        ConfigError: options do not fit the network.
    """
    if runner.no_extension and not options.recompute:
        log.info("without prefix caching and chunked prefill: %s", runner.no_extension)
    return InferenceEngine(
        runner,
        rows=rows,
        tokenizer=tokenizer,
        recompute=recompute,
        batched_tokens=options.max_num_batched_tokens,
        prefix_caching=options.prefix_caching,
        draft_tokens=options.prompt_lookup_num_tokens,
    )


def _set_threads(launch: Launch, device: torch.device) -> None:
    """Compute on CPUs with this process's share of the cores."""
    if device.type == "cpu":
        torch.set_num_threads(cpu_threads(launch))


def _kernels_of(
    config: Config, spec: ModelSpec, groups: Groups, dtype: torch.dtype, device: torch.device
) -> Kernels:
    """Return the kernels that flags permit, those of training unless they are on the command line.

    Communication: on GPUs with process groups, all ranks agree on each kernel; call it in step.
    """
    return choose_inference_kernels(
        plan_kernels(config.kernels, config.model, config.precision),
        spec,
        tensor=groups.topology.tensor,
        dtype=dtype,
        device=device,
        trials=Trials(agree=agree_on_failure),
    )


def _with_equal_shards(spec: ModelSpec, groups: Groups) -> ModelSpec:
    """Return `spec` with as many rows of the word embeddings on each rank; the padding has no token."""
    tensor = groups.topology.tensor
    return replace(spec, vocabulary=spec.vocabulary.in_equal_shards(tensor))


@dataclass(frozen=True, kw_only=True)
class PreparedProcess:
    """Parts of this process from which an encoder network is built.

    Args:
        is_first: whether this process prints, or serves requests.
    """

    tokenizer: Tokenizer
    spec: ModelSpec
    groups: Groups
    dtype: torch.dtype
    device: torch.device
    is_first: bool

    def build(self, runner: Callable[..., Runner], source: ModelSource) -> Runner:
        """Build a runner of the network with the weights of `source`.

        Raises:
            CheckpointError: the weights are damaged or do not fit the network.
        """
        with source.weights() as full:
            return runner(
                _with_equal_shards(self.spec, self.groups),
                full.parameters,
                groups=self.groups,
                dtype=self.dtype,
                device=self.device,
                kernels=_kernels_of(source.config, self.spec, self.groups, self.dtype, self.device),
            )


def prepare_encoder(
    source: ModelSource, service: Service, options: DecodingConfig | None = None
) -> PreparedProcess:
    """Prepare this process for the network of a checkpoint that does not continue prompts.

    Args:
        service: what it has to do.
        options: of decoding, and the dtype; None for fp32.

    Raises:
        ConfigError: flags do not fit the network or the machine.
        WrongCheckpointError: the checkpoint holds another network.

    Communication: every rank must call this, in step.
    """
    parallel = source.config.parallel
    tokenizer, spec = tokenizer_and_spec(source)
    require_service(source, spec, service)
    launch, device = prepare_process(parallel)
    dtype: Dtype = "fp32"
    problems: list[str] = []
    if options is not None:
        dtype = inference_dtype(options, source.config.precision, device=device.type)
        problems += candidate_problems(options, vocab_size=spec.vocabulary.vocab_size)
    problems += [
        *layout_problems(parallel, spec, world_size=launch.world_size),
        *batch_problems(source.config.training.micro_batch_size),
        *dtype_problems(dtype, device=device.type),
    ]
    raise_if_any([*problems, *_stage_problems(parallel, spec)])
    _set_threads(launch, device)
    return PreparedProcess(
        tokenizer=tokenizer,
        spec=spec,
        groups=_inference_groups(parallel, 1, device, master_address(launch)),
        dtype=TORCH_DTYPES[dtype],
        device=device,
        is_first=launch.rank == 0,
    )


def _stage_problems(parallel: ParallelConfig, spec: ModelSpec) -> Iterator[str]:
    """Yield why a network that does not continue prompts cannot be divided into pipeline stages."""
    if parallel.pipeline_model_parallel_size > 1 and network_of(spec).service != "prompts":
        yield (
            f"--pipeline-model-parallel-size {parallel.pipeline_model_parallel_size}: a "
            f"{spec.architecture.upper()} is used without pipeline stages; write 1"
        )


def tokenizer_and_spec(source: ModelSource) -> tuple[Tokenizer, ModelSpec]:
    """Return the tokenizer and the model's spec, which must equal the training run's spec."""
    config, manifest = source.config, source.manifest
    objective = manifest.objective.name
    arguments = tokenizer_arguments_of(source, objective)
    if problems := [*tokenizer_problems(**arguments)]:
        raise ConfigError(*problems, *tokenizer_advice(source, arguments))
    try:
        tokenizer = build_tokenizer(**arguments)
    except DataError as error:
        raise WrongDataError(
            f"{error} (tokenizer flags that are not on the command line come from "
            f"{source.folder}: give --vocab-file and the like with the present paths)"
        ) from error
    spec = plan_model(
        with_network(config, manifest.spec),
        vocab_size=tokenizer.vocab_size,
        tensor=manifest.parallel.tensor,
        objective=objective,
    )
    saved, now = (each.vocabulary.vocab_size for each in (manifest.spec, spec))
    if saved != now:
        raise WrongCheckpointError(
            f"{source.folder} was trained with a vocabulary of {saved} tokens, and the tokenizer of "
            f"these flags has {now}: leave out the flags of the tokenizer, which come from the "
            "checkpoint then"
        )
    require_same_model(manifest.plan, {"model": flat(spec)}, str(source.folder))
    return tokenizer, spec


def require_service(source: ModelSource, spec: ModelSpec, *services: Service) -> Architecture:
    """Return the network of a checkpoint; refuse one that does something else, and name the tool for it.

    Raises:
        WrongCheckpointError: its network has none of `services`, or the head of a downstream task.
    """
    if spec.head:
        task = task_in(source.manifest.plan)
        raise WrongCheckpointError(
            f"{source.folder} has the head of --task {task} in place of the pretraining head: "
            "tasks/ evaluates it, with --epochs 0"
        )
    network = network_of(spec)
    if network.service not in services:
        known = NETWORKS.with_extensions()
        names = [name for name in known if network_named(name).service in services]
        raise WrongCheckpointError(
            f"{source.folder} holds no {' or '.join(names).upper()} but a {network.name.upper()}: "
            f"{network.use}"
        )
    return network


def lone_groups() -> Groups:
    """Return the process groups of a single process."""
    lone_group()
    return build_groups(Topology(pipeline=1, data=1, tensor=1))


def _inference_groups(
    parallel: ParallelConfig, replicas: int, device: torch.device, address: MasterAddress
) -> Groups:
    """Return the tensor, pipeline and data-parallel groups of this process.

    Args:
        address: of the rendezvous.

    Raises:
        TrainingError: the rendezvous fails.

    Communication: waits for every rank.
    """
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if tensor * pipeline * replicas == 1:
        return lone_groups()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Tensors in host memory always go over gloo.
    default = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    named = parallel.distributed_backend
    dist.init_process_group(
        default if named in (None, "nccl") else named,
        store=rendezvous(address, _RENDEZVOUS_TIMEOUT),
        rank=address.rank,
        world_size=address.world_size,
        timeout=_COLLECTIVE_TIMEOUT,
    )
    return build_groups(Topology(pipeline=pipeline, data=replicas, tensor=tensor))


def chat_prompts_of(
    source: ModelSource, tokenizer: Tokenizer, file: str | None
) -> ChatPrompts | None:
    """Return the encoder of conversations; None without a chat template.

    The template is that in `file`, else the one recorded in the checkpoint, else the tokenizer's.

    Raises:
        DataError: the file cannot be read.
    """
    flags = tokenizer_arguments_of(source, source.manifest.objective.name)
    is_pretrained = flags["tokenizer_type"] == "PretrainedFromHF"
    name = flags["tokenizer_name_or_path"] if is_pretrained else None
    template = read_chat_template(file, name, keywords(flags.get("tokenizer_kwargs") or ()))
    recorded = source.manifest.data.chat_template
    if recorded and file is None:
        template = replace(template, source=recorded)
    return ChatPrompts(tokenizer, template) if template.source else None


def fim_tokens_of(source: ModelSource, tokenizer: Tokenizer) -> FimTokens | None:
    """Return the special tokens of fill-in-the-middle; None if the model was not trained for it.

    A model trained only with the suffix before the prefix (SPM) does not support the usual order.
    """
    name = source.manifest.objective.name
    if name != "gpt":
        return None
    objective = plan_objective(source.config, name)
    if not objective.fim.rate or objective.fim.spm_rate == 1:
        return None
    return fim_tokens(objective.fim, tokenizer)
