"""A checkpoint loaded in one layout and saved in another, without a step in between."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.checkpoint.layouts import read_whole
from megatron.checkpoint.manifest import Manifest
from megatron.config.config import Config
from megatron.config.kernels import KernelsConfig
from megatron.errors import ConfigError
from megatron.parallel.random import renewed_seed
from megatron.plan.plan import plan
from megatron.training import setup
from megatron.training.environment import Launch
from megatron.training.objective import OBJECTIVES
from megatron.training.save import Checkpoints
from megatron.training.state import TrainState


def config_of_layout(
    saved: Config, manifest: Manifest, output: str, *, tensor: int, pipeline: int
) -> Config:
    """Return the wishes of the run that saved a checkpoint, for another layout on CPUs.

    Raises:
        ConfigError: it trained in fp16, which CPUs do not.
    """
    if manifest.plan["precision"]["dtype"] == "fp16":
        raise ConfigError("fp16 needs a GPU: give --load this checkpoint in the layout you want")
    size = manifest.plan["batch"]["global_batch_size"]
    return replace(
        saved,
        parallel=replace(
            saved.parallel,
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            device="cpu",
            distributed_backend="gloo",
        ),
        training=replace(saved.training, global_batch_size=size),
        kernels=KernelsConfig(),
        checkpoint=replace(
            saved.checkpoint,
            save=output,
            save_interval=saved.checkpoint.save_interval or 1,
            async_save=False,
            load=None,
            keep_last=None,
            keep_every=None,
            finetune=False,
            reset_progress=False,
            exit_on_missing_checkpoint=False,
            universal_checkpoint=False,
        ),
    )


def save_in_layout(config: Config, manifest: Manifest, source: Path, launch: Launch) -> None:
    """Save what is in `source` as `config` lays it out.

    Raises:
        MegatronError: the checkpoint is damaged, or the network cannot be divided so.

    Communication: every rank of the new layout must call this.
    """
    device, objective = torch.device("cpu"), OBJECTIVES[manifest.plan["objective"]["name"]]
    decided = plan(
        config,
        world_size=launch.world_size,
        vocab_size=manifest.plan["model"]["vocab_size"],
        device=device.type,
        objective=objective.name,
    )
    setup.start_processes(config, launch, device, deterministic=False)
    groups = setup.build_process_groups(decided)
    kernels, _ = setup.choose(decided, device)
    engine = setup.build_gpt_engine(decided, groups, objective, kernels)
    engine.load_whole(read_whole(source, manifest, verify=launch.rank == 0))
    state = TrainState(**manifest.state)
    engine.renew_streams(
        renewed_seed(decided.training.seed, state.iteration),
        sequence_parallel=decided.parallel.sequence_parallel,
    )
    Checkpoints(engine, decided, config).save(state)
    dist.barrier()
    dist.destroy_process_group()
