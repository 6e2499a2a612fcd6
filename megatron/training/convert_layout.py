"""Reshard a checkpoint: load it in one layout and save it in another, without a step."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.checkpointing.manifest import Manifest
from megatron.checkpointing.resharding.universal import read_checkpoint
from megatron.checkpointing.train_state import TrainState
from megatron.common.registry import OBJECTIVES
from megatron.config.config import Config
from megatron.config.network.kernels import KernelsConfig
from megatron.config.plan.plan import plan
from megatron.config.plugins import hooks_of_sections
from megatron.config.run.checkpoint import CheckpointConfig
from megatron.config.run.guards import GuardsConfig
from megatron.engine.deepspeed.patches.runtime import any_dtype
from megatron.tensor_parallel.rng import renewed_seed
from megatron.training import setup
from megatron.training.checkpoints.checkpoint_choice import with_saved_softmax
from megatron.training.checkpoints.save import Checkpoints
from megatron.training.checkpoints.save_directory import sole_writer
from megatron.training.process.environment import Launch


def config_of_layout(
    saved: Config, manifest: Manifest, output: str, *, tensor: int, pipeline: int
) -> Config:
    """Return the config of the run that saved a checkpoint, for another layout on CPUs."""
    run_sections = {hook.section for hook in hooks_of_sections(saved.extensions).values()}
    size, saves = manifest.batch.global_batch_size, manifest.checkpoint
    return replace(
        saved,
        parallel=replace(
            saved.parallel,
            world_size=None,
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            # Stages of the layout that saved it.
            pipeline_model_parallel_split_rank=None,
            num_layers_per_virtual_pipeline_stage=None,
            num_virtual_stages_per_pipeline_rank=None,
            enable_zbh1_pipeline=False,
            device="cpu",
            distributed_backend="gloo",
        ),
        # Options of resuming do not apply to a conversion.
        training=replace(
            saved.training,
            global_batch_size=None if saved.training.step_batch_size_schedule else size,
            gradient_accumulation_steps=None,
            max_restarts=0,
        ),
        logging=replace(saved.logging, slow_rank_factor=None),
        guards=GuardsConfig(),
        extensions={
            name: own for name, own in saved.extensions.items() if name not in run_sections
        },
        kernels=KernelsConfig(),
        checkpoint=CheckpointConfig(
            save=output,
            save_interval=saved.checkpoint.save_interval or 1,
            no_save_optim=not saves.saves_optimizer,
            no_save_rng=not saves.saves_streams,
        ),
    )


def save_in_layout(config: Config, manifest: Manifest, source: Path, launch: Launch) -> None:
    """Reshard the checkpoint `source` to the layout of `config` and save it.

    Raises:
        MegatronError: the checkpoint is damaged, or the network cannot be divided so.

    Communication: every rank of the new layout must call this.
    """
    device, learned = torch.device("cpu"), manifest.objective
    objective = OBJECTIVES.get(learned.name, learned.own_flags)()
    decided = plan(
        config,
        world_size=launch.world_size,
        vocab_size=manifest.spec.vocabulary.vocab_size,
        # Nothing is computed, so that fp16 needs no GPU.
        device="cuda" if manifest.precision.dtype == "fp16" else device.type,
        objective=objective.name,
    )
    decided = with_saved_softmax(decided, manifest)
    setup.use_device(device, launch)
    setup.start_processes(config, launch, device)
    groups = setup.build_process_groups(decided)
    kernels, _ = setup.choose(decided, device)
    with any_dtype():
        engine = setup.build_engine(decided, groups, objective, kernels)
    full = read_checkpoint(source, manifest, verify=launch.rank == 0)
    engine.load_full(
        full,
        optimizer=decided.checkpoint.saves_optimizer,
        copies_padding=decided.model.vocabulary.padded_vocab_in_softmax,
    )
    state = TrainState()
    state.load(manifest.state)
    engine.renew_streams(
        renewed_seed(decided.training.seed, state.iteration),
        sequence_parallel=decided.parallel.sequence_parallel,
    )
    with sole_writer(decided):
        Checkpoints(engine, decided, config).save(state)
    dist.barrier()
    dist.destroy_process_group()
