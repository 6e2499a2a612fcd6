"""A trained model, loaded for generation: from a checkpoint and wishes to an engine."""

from dataclasses import asdict, dataclass, replace

import torch

from megatron.checkpointing.compare import require_same_model
from megatron.common.errors import DataError, WrongDataError, raise_if_any
from megatron.config.data.tokenizer import gpt_tokenizer_arguments
from megatron.config.inference.generation import (
    GenerationConfig,
    dtype_problems,
    inference_dtype,
    layout_problems,
    room_problems,
    vocabulary_problems,
)
from megatron.config.network.model_spec import ModelSpec
from megatron.config.parallelism.layout import ParallelConfig
from megatron.config.plan import plan_model
from megatron.inference.engine.continuous_batching import Engine
from megatron.inference.engine.inference_groups import join_processes
from megatron.inference.engine.model_runner import Stage
from megatron.inference.loading.model_source import ModelSource
from megatron.tensor_parallel.dtypes import TORCH_DTYPES
from megatron.tensor_parallel.master_address import MasterAddress
from megatron.tensor_parallel.process_groups import Groups
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.types.tokenizer import Tokenizer
from megatron.training.process.device import prepare_process
from megatron.training.process.environment import cpu_threads, master_address


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model that is ready.

    Args:
        is_first: whether this process gives the engine work; the others follow it.
    """

    engine: Engine
    tokenizer: Tokenizer
    spec: ModelSpec
    is_first: bool


def load_model(
    source: ModelSource, wishes: GenerationConfig, *, rows: int, with_replicas: bool = False
) -> LoadedModel:
    """Return the model of a checkpoint, in the layout that is asked for.

    Args:
        rows: most sequences at once.
        with_replicas: whether more processes than one model needs may have further ones.

    Raises:
        ConfigError: the wishes contradict each other or the machine.
        CheckpointError: the checkpoint is damaged, or of another network than asked for.

    Communication: every rank must call this, in step.
    """
    config, parallel = source.config, source.config.parallel
    tokenizer, spec = _trained(source)
    launch, device = prepare_process(parallel)
    dtype = inference_dtype(wishes, config.precision, device=device.type)
    of_one = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    replicas = max(1, launch.world_size // max(1, of_one)) if with_replicas else 1
    raise_if_any(
        [
            *layout_problems(
                config.parallel, spec, world_size=launch.world_size, replicas=replicas
            ),
            *room_problems(wishes, spec, rows=rows),
            *vocabulary_problems(wishes, vocab_size=spec.vocab_size),
            *dtype_problems(dtype, device=device.type),
        ]
    )
    if device.type == "cpu":
        torch.set_num_threads(cpu_threads(launch))
    groups = _joined(parallel, replicas, device, master_address(launch))
    stage = _filled(
        source, wishes, spec, groups, dtype=TORCH_DTYPES[dtype], device=device, rows=rows
    )
    return LoadedModel(
        engine=Engine(stage, rows=rows, tokenizer=tokenizer, recompute=wishes.recompute),
        tokenizer=tokenizer,
        spec=spec,
        is_first=launch.rank == 0,
    )


def _trained(source: ModelSource) -> tuple[Tokenizer, ModelSpec]:
    """Return the tokenizer and the network, which must be that of the training."""
    config, manifest = source.config, source.manifest
    try:
        tokenizer = build_tokenizer(**gpt_tokenizer_arguments(config.tokenizer))
    except DataError as error:
        raise WrongDataError(
            f"{error} (what the command line leaves out of the tokenizer's flags is taken from "
            f"{source.folder}: give --vocab-file and the others where the files are now)"
        ) from error
    spec = plan_model(
        config, vocab_size=tokenizer.vocab_size, tensor=manifest.plan["parallel"]["tensor"]
    )
    require_same_model(manifest.plan, {"model": asdict(spec)}, str(source.folder))
    return tokenizer, spec


def _joined(
    parallel: ParallelConfig, replicas: int, device: torch.device, place: MasterAddress
) -> Groups:
    """Return this process's groups. Communication: waits for every rank."""
    default = "nccl" if device.type == "cuda" else "gloo"
    return join_processes(
        tensor=parallel.tensor_model_parallel_size,
        pipeline=parallel.pipeline_model_parallel_size,
        replicas=replicas,
        backend=parallel.distributed_backend or default,
        device=device,
        place=place,
    )


def _filled(
    source: ModelSource,
    wishes: GenerationConfig,
    spec: ModelSpec,
    groups: Groups,
    *,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
) -> Stage:
    """Return this rank's layers with their weights."""
    tensor = groups.topology.tensor
    # The table's rows are divided evenly; what is added stands for no token.
    even = replace(spec, padded_vocab_size=-(-spec.padded_vocab_size // tensor) * tensor)
    with source.weights() as whole:
        return Stage(
            even,
            whole.parameters,
            groups=groups,
            dtype=dtype,
            device=device,
            rows=0 if wishes.recompute else rows,
            max_length=wishes.inference_max_seq_length,
            sees_prefix=source.manifest.plan.get("objective", {}).get("sees_prefix", False),
        )
