"""A trained model, opened for generation: from a checkpoint and wishes to an engine."""

from dataclasses import asdict, dataclass, replace

import torch

from megatron.checkpoint.compare import require_same_model
from megatron.config.generation import GenerationConfig
from megatron.errors import raise_if_any
from megatron.generation.engine import Engine
from megatron.generation.processes import join_processes
from megatron.generation.stage import Stage
from megatron.plan.generation_plan import (
    dtype_problems,
    inference_dtype,
    layout_problems,
    length_problems,
)
from megatron.plan.model_spec import ModelSpec, plan_model
from megatron.plan.tokenizer_plan import gpt_tokenizer_arguments
from megatron.serving.wishes import Source
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.tokenizer import Tokenizer
from megatron.training.device import prepare_process
from megatron.training.environment import cpu_threads

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A model that is ready.

    Args:
        is_first: whether this process gives the engine work; the others follow it.
    """

    engine: Engine
    tokenizer: Tokenizer
    spec: ModelSpec
    is_first: bool


def open_model(
    source: Source, wishes: GenerationConfig, *, rows: int, with_replicas: bool = False
) -> Opened:
    """Return the model of a checkpoint, in the layout that is asked for.

    Args:
        rows: most sequences at once.
        with_replicas: whether more processes than one model needs may have further ones.

    Raises:
        ConfigError: the wishes contradict each other or the machine.
        CheckpointError: the checkpoint is damaged, or of another network than asked for.

    Communication: every rank must call this, in step.
    """
    config, manifest = source.config, source.manifest
    tokenizer = build_tokenizer(**gpt_tokenizer_arguments(config.tokenizer))
    trained = plan_model(
        config, vocab_size=tokenizer.vocab_size, tensor=manifest.plan["parallel"]["tensor"]
    )
    require_same_model(manifest.plan, {"model": asdict(trained)}, str(source.folder))
    launch, device = prepare_process(config.parallel)
    tensor = config.parallel.tensor_model_parallel_size
    pipeline = config.parallel.pipeline_model_parallel_size
    dtype = inference_dtype(wishes, config.precision, device=device.type)
    replicas = max(1, launch.world_size // max(1, tensor * pipeline)) if with_replicas else 1
    raise_if_any(
        [
            *layout_problems(config, trained, world_size=launch.world_size, replicas=replicas),
            *length_problems(wishes, trained),
            *dtype_problems(dtype, device=device.type),
        ]
    )
    if device.type == "cpu":
        torch.set_num_threads(cpu_threads(launch))
    default = "nccl" if device.type == "cuda" else "gloo"
    groups = join_processes(
        tensor=tensor,
        pipeline=pipeline,
        replicas=replicas,
        backend=config.parallel.distributed_backend or default,
        device=device,
    )
    with source.weights() as whole:
        stage = Stage(
            # The table's rows are divided evenly; what is added stands for no token.
            replace(trained, padded_vocab_size=-(-trained.padded_vocab_size // tensor) * tensor),
            whole.parameters,
            groups=groups,
            dtype=_DTYPES[dtype],
            device=device,
            rows=0 if wishes.recompute else rows,
            max_length=wishes.inference_max_seq_length,
            sees_prefix=manifest.plan.get("objective", {}).get("sees_prefix", False),
        )
    return Opened(
        engine=Engine(stage, rows=rows, decode=tokenizer.decode, recompute=wishes.recompute),
        tokenizer=tokenizer,
        spec=trained,
        is_first=launch.rank == 0,
    )
