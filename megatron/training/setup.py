"""Build the objects of a run from its plan: one function for each."""

import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.checkpointing.parameter_names import ParameterNames
from megatron.common.errors import ConfigError
from megatron.common.logging import set_level
from megatron.common.registry import OBJECTIVES
from megatron.config.architecture.architecture import network_of
from megatron.config.config import Config
from megatron.config.network.prediction import PredictionSpec
from megatron.config.optimization.batch_size import BatchPlan
from megatron.config.plan.plan import Plan
from megatron.config.run.logging import LoggingConfig
from megatron.config.run.watchdog import WatchPlan
from megatron.data.datasets.datasets import build_datasets
from megatron.data.datasets.run_datasets import DataRequest, Datasets, RoleView, View
from megatron.data.sampling.provenance import TracedSource
from megatron.engine import build
from megatron.engine.deepspeed import distributed
from megatron.engine.deepspeed.compile_locks import watching_compile_locks
from megatron.engine.deepspeed.recompute import start_streams
from megatron.engine.deepspeed.timers import HostEvent, Pace, Timers
from megatron.engine.engine import Engine
from megatron.engine.experts import mixture_builder
from megatron.engine.optimizers import engine_optimizer
from megatron.engine.token_counts import TokenCounts
from megatron.fused_kernels.reference.cross_entropy import COMPILED
from megatron.fused_kernels.reference.dispatch import Kernels
from megatron.fused_kernels.registry import Choice, choose_kernels
from megatron.fused_kernels.trials import Trials, Workload
from megatron.model.compiled_blocks import Compiler
from megatron.model.initialization import initialise
from megatron.model.layers.layer_list import Step
from megatron.model.layers.moe_aux_loss import AuxiliaryLoss
from megatron.model.layers.parts import LayerParts
from megatron.model.prediction_loss import loss_with_predictions
from megatron.objectives.objective import Objective
from megatron.tensor_parallel.broadcast import Batch
from megatron.tensor_parallel.dtypes import TORCH_DTYPES
from megatron.tensor_parallel.object_collectives import agree_on_failure
from megatron.tensor_parallel.process_groups import Groups, build_groups
from megatron.tensor_parallel.rng import OrdinaryStream
from megatron.tensor_parallel.topology import Topology
from megatron.training.loop.batch import read_batches
from megatron.training.loop.collectives import from_rank_0, rank_0_first
from megatron.training.process.environment import (
    Launch,
    compiled_extensions,
    cpu_threads,
    export_determinism,
    master_address,
    verbosity,
)
from megatron.training.process.watchdog import Hangs, Watchdog

log = logging.getLogger(__name__)


def set_log_levels(logging: LoggingConfig, rank: int) -> str:
    """Set this rank's log level; return the least level of DeepSpeed's messages."""
    requested = logging.log_level if rank == 0 else logging.log_level_replica
    level = requested or verbosity()
    if level:
        set_level(level)
    return level or "warning"


def use_device(device: torch.device, launch: Launch, *, deterministic: bool = False) -> None:
    """Make `device` this process's current one, before kernels are chosen.

    A Triton kernel is launched on the current GPU, wherever its tensors are; and which attention
    kernels PyTorch offers depends on whether they must be deterministic.

    Args:
        deterministic: whether the same computation must give the same bits each time.

    Raises:
        ConfigError: an environment variable lets results differ.
    """
    if deterministic:
        export_determinism()
        torch.use_deterministic_algorithms(True)
        # Filling new memory would be one more write of each result: nothing here reads memory that
        # was not written, as kernels and copies write all that they allocate.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(cpu_threads(launch))


def start_processes(
    config: Config,
    launch: Launch,
    device: torch.device,
    *,
    timeout_minutes: int = 0,
    look: Callable[[], None] = lambda: None,
) -> None:
    """Join the other processes.

    Args:
        timeout_minutes: how long they wait for each other in one operation; 0: the default.
        look: called about twice a second while this process waits for others; may raise.

    Raises:
        ConfigError: two processes have the same GPU.
        TrainingError: the processes do not find each other.

    Communication: waits for every rank.
    """
    level = set_log_levels(config.logging, launch.rank)
    default = "nccl" if device.type == "cuda" else "gloo"
    backend = config.parallel.distributed_backend or default
    try:
        distributed.start(
            backend,
            level,
            timeout_minutes=timeout_minutes,
            place=master_address(launch),
            device=device,
            look=look,
        )
    except RuntimeError as error:
        if "Duplicate GPU" in str(error):  # NCCL finds it out as processes meet
            raise _shared_device(launch) from error
        raise
    require_own_device(device, launch)


def require_own_device(device: torch.device, launch: Launch) -> None:
    """Refuse a GPU that another process of the run computes on too.

    Only where each process sees a single GPU: of several, it takes the one of its local rank.

    Raises:
        ConfigError: another process was here first.

    Communication: reads from the rendezvous store.
    """
    if device.type != "cuda" or launch.local_size == 1 or torch.cuda.device_count() > 1:
        return
    name = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
    if not distributed.is_first_to_claim(name):
        raise _shared_device(launch)


def _shared_device(launch: Launch) -> ConfigError:
    return ConfigError(
        f"{launch.local_size} processes were started on this node ({socket.gethostname()}), each "
        "of which sees 1 GPU, and two of them the same; start one process per GPU, or write "
        "--device cpu"
    )


def watch(watchdog: Watchdog, plan: WatchPlan, directory: Path) -> None:
    """Agree with the other ranks on the folder of stack dumps when the run hangs.

    Args:
        directory: --save.

    Communication: one broadcast of a name if hangs are looked for.
    """
    if plan.hang_timeout_s:
        now = datetime.now().strftime("%Y%m%d-%H%M%S")
        folder = directory / from_rank_0(lambda: f"hang-{now}")
        watchdog.arm(Hangs(plan.hang_timeout_s, folder, dist.get_world_size()))
        if dist.get_backend() == "nccl" and not plan.group_timeout_minutes:
            # Else NCCL aborts the process, without a cause, before the watchdog ends it.
            distributed.set_timeout(minutes=plan.hang_timeout_s / 40)
        log.info("a step that takes more than %g s ends the run as hung", plan.hang_timeout_s)


def build_process_groups(plan: Plan) -> Groups:
    """Create this rank's process groups.

    Communication: every rank must call this, in step.
    """
    parallel = plan.parallel
    return build_groups(
        Topology(
            pipeline=parallel.pipeline,
            data=parallel.data,
            sequence=parallel.sequence,
            tensor=parallel.tensor,
            expert=parallel.expert,
            expert_tensor=parallel.expert_tensor,
            zigzag=parallel.ring,
        )
    )


def choose(plan: Plan, device: torch.device) -> tuple[Kernels, tuple[Choice, ...]]:
    """Return the kernels that compute the network's operations, and why.

    Raises:
        ConfigError: a fused kernel is wanted at any price and cannot be used.

    Communication: on GPUs with process groups, all ranks agree on each kernel; call it in step.
    """
    work = Workload(
        spec=plan.model,
        dtype=TORCH_DTYPES[plan.precision.dtype],
        positions=plan.batch.micro_batch_size * plan.model.seq_length,
        tensor=plan.parallel.tensor,
        device=device,
        has_spans=_has_spans(plan),
        ring=plan.parallel.ring,
    )
    return choose_kernels(plan.kernels, work, trials=Trials(agree=agree_on_failure))


def _has_spans(plan: Plan) -> bool:
    """Whether batches limit what tokens see, or the network does: an encoder's padding."""
    objective: Objective = OBJECTIVES.get(plan.objective.name, plan.objective.own_flags)()
    fields = objective.batch_fields(plan.masks)
    return "attention_span" in fields or network_of(plan.model).masks_padding


def build_engine(
    plan: Plan,
    groups: Groups,
    objective: Objective,
    kernels: Kernels,
    *,
    compile_backend: str = "inductor",
) -> Engine:
    """Build this rank's part of the network of `objective`, with its optimizer and its loss.

    Args:
        kernels: what computes the operations.
        compile_backend: of torch.compile, if the plan compiles.

    Communication: every rank must call this, in step.
    """
    model = plan.model
    batch_fields = tuple(objective.batch_fields(plan.masks))
    counted = None if model.vocabulary.padded_vocab_in_softmax else model.vocabulary.vocab_size
    layers = range(1, model.num_layers + model.part(PredictionSpec).num_layers + 1)
    auxiliary = AuxiliaryLoss([*map(model.experts_of, layers)]) if model.moe else None
    counts = TokenCounts(groups.data_and_sequence) if plan.masks.per_token_loss else None
    with watching_compile_locks(compiled_extensions()):
        return build.build_engine(
            _layers(plan, groups, objective, kernels, batch_fields, auxiliary),
            loss=loss_with_predictions(
                objective.loss(plan.objective)(
                    groups.tensor,
                    kernels,
                    vocab_size=counted,
                    sequence_group=groups.sequence,
                    **({"mean_count": counts.mean} if counts else {}),
                ),
                model.prediction,
            ),
            groups=groups,
            parallel=plan.parallel,
            recompute=plan.recompute,
            initialise=partial(
                initialise,
                seed=plan.training.seed,
                std=model.init_std,
                num_layers=network_of(model).residual_additions(model) / 2,
                xavier=model.init == "xavier_uniform",
                vocab_size=counted,
            ),
            build_optimizer=_optimizer_builder(plan, groups),
            config=plan.deepspeed,
            batch_fields=batch_fields,
            timers=_timers(plan),
            counts_zeros=plan.logging.num_zeros and not plan.evaluation.only,
            num_padding=_num_padding(plan),
            auxiliary=auxiliary,
            loss_terms=objective.loss_terms(model),
            compiler=_compiler(plan, kernels, compile_backend),
            counts=counts,
        )


def _num_padding(plan: Plan) -> int:
    """Return how many trained weights are padding, whose gradient is always zero."""
    model, optimizer = plan.model, plan.optimizer
    is_frozen = (
        model.lora is not None
        or optimizer.biases_only
        or optimizer.freezes("embedding.word_embeddings.weight")
    )
    counts = model.vocabulary.padded_vocab_in_softmax or is_frozen
    return 0 if counts else model.num_padding_parameters


def _optimizer_builder(
    plan: Plan, groups: Groups
) -> Callable[[torch.nn.Module], torch.optim.Optimizer] | None:
    """Return the function that builds the optimizer; None for a model that is only evaluated."""
    if not plan.evaluation.optimizer:
        return None
    return partial(
        engine_optimizer,
        plan=plan.optimizer,
        lr=plan.schedule.peak,
        tensor_group=groups.tensor,
        dtype=TORCH_DTYPES[plan.precision.dtype],
        module_name=ParameterNames.of(plan.model).module,
        adapters_only=plan.model.lora is not None,
    )


def _compiler(plan: Plan, kernels: Kernels, backend: str) -> Compiler | None:
    """Return the function that compiles transformer layers and the loss; None without --compile."""
    if plan.kernels.compile == "none":
        return None
    # A loss in chunks calls autograd itself, which torch.compile does not take.
    in_chunks = plan.kernels.loss_chunk_tokens > 0
    return Compiler(
        mode=plan.kernels.compile,
        compiles_loss=kernels.cross_entropy is COMPILED and not in_chunks,
        backend=backend,
    )


def _layers(
    plan: Plan,
    groups: Groups,
    objective: Objective,
    kernels: Kernels,
    batch_fields: Sequence[str],
    auxiliary: AuxiliaryLoss | None,
) -> list[Step]:
    """Return the network of `objective`, its layers not built yet, after seeding the RNGs."""
    parallel = plan.parallel
    rng = start_streams(
        groups,
        seed=plan.training.seed,
        activation_checkpointing=plan.deepspeed.get("activation_checkpointing", {}),
        sequence_parallel=parallel.sequence_parallel,
    )
    mixture = mixture_builder(plan.experts, groups, auxiliary=auxiliary) if auxiliary else None
    parts = LayerParts(
        group=groups.tensor,
        # Compiled code cannot switch RNG states; the checks of flags saw to it that one is enough.
        rng=rng if plan.kernels.compile == "none" else OrdinaryStream(),
        batch_fields=batch_fields,
        mixed=plan.precision.is_mixed,
        kernels=kernels,
        build_mixture=mixture,
        sequence_parallel=parallel.sequence_parallel,
        core_attention=build.core_attention(
            plan.model, kernels, groups=groups, parallel=parallel, recompute=plan.recompute
        ),
        loss_chunk_tokens=plan.kernels.loss_chunk_tokens,
    )
    return objective.layers(plan.model, parts)


def _timers(plan: Plan) -> Timers:
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return Timers(
        plan.logging.timing_level,
        nvtx=plan.logging.nvtx,
        synchronise=torch.cuda.synchronize if on_gpu else None,
        pace=Pace(partial(torch.cuda.Event, enable_timing=True) if on_gpu else HostEvent)
        if plan.logging.slow_rank_factor
        else None,
    )


def read_datasets(plan: Plan, view: View | RoleView | None = None) -> Datasets:
    """Return the training, validation and test sets.

    Args:
        view: what the objective puts over each.

    Raises:
        DataError: the files are missing or damaged, or hold nothing to train on.

    Communication: rank 0 builds the index maps first, the others read them where they can.
    """
    build = partial(
        build_datasets,
        plan.data,
        seq_length=plan.model.seq_length,
        seed=plan.training.seed,
        view=view,
    )
    return rank_0_first(build)


def data_request(plan: Plan) -> DataRequest:
    """Return the request for which an objective builds its data sets."""
    return DataRequest(
        data=plan.data,
        model=plan.model,
        objective=plan.objective,
        batch=plan.batch,
        seed=plan.training.seed,
        trains=not plan.evaluation.only,
    )


def batches_of(
    dataset: TracedSource,
    consumed_samples: int,
    *,
    plan: Plan,
    objective: Objective,
    eod: int | None,
    groups: Groups,
    device: torch.device,
    batch: BatchPlan | None = None,
    length: Callable[[], int] | None = None,
) -> Iterator[Batch]:
    """Return this replica's micro-batches of `dataset` from `consumed_samples` on.

    Args:
        batch: sizes of the batches (default: as in training).
        length: returns how many positions of a sample are taken (default: all).
    """
    return read_batches(
        dataset,
        collate=objective.collate(plan.objective, plan.masks, eod),
        fields=objective.batch_fields(plan.masks),
        token_fields=objective.token_fields,
        consumed_samples=consumed_samples,
        batch=batch or plan.batch,
        letters={"s": plan.model.seq_length, **objective.letters(plan.model)},
        vocab_size=plan.model.vocabulary.vocab_size,
        groups=groups,
        device=device,
        length=length,
    )
