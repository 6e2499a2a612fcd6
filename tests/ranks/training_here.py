"""Training in this process, where its rank and its device are known, as the entry scripts do it."""

from collections.abc import Sequence

import torch

from megatron.checkpointing.saved_run import saved_progress
from megatron.common.errors import ExitCode
from megatron.config.config import Config
from megatron.objectives.objective import Objective
from megatron.training import pretrain
from megatron.training.prepare import local_save, prepare
from megatron.training.process.environment import Launch
from megatron.training.process.failure import FailureFile
from megatron.training.process.watchdog import Watchdog


def train_here(
    config: Config,
    launch: Launch,
    device: torch.device,
    objective: Objective,
    *,
    notices: Sequence[str] = (),
) -> ExitCode:
    """Prepare, validate and train by `config`."""
    save = "" if config.guards.replay_step else local_save(config)
    config = prepare(config, objective.name, world_size=launch.world_size)
    start = pretrain.validate(
        config,
        world_size=launch.world_size,
        device=device.type,
        objective=objective.name,
        done=saved_progress(config.checkpoint),
    )
    watchdog = Watchdog(FailureFile(save), rank=launch.rank)
    return pretrain.pretrain(start, launch, device, objective, watchdog, notices=notices)
