"""Common code of the entry scripts: from a command line to the training of one objective."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.checkpointing.saved_run import checkpoint_flags, lost_plugins
from megatron.common.errors import ConfigError, ExitCode
from megatron.common.registry import OBJECTIVES
from megatron.config.config import Config, parse_config
from megatron.config.data.objective import ObjectiveName
from megatron.config.run.watchdog import plan_watch
from megatron.training.early_checks import require_startable
from megatron.training.loop.loop import Hook
from megatron.training.process.environment import read_launch, read_launcher
from megatron.training.process.failure import FailureFile
from megatron.training.process.launchers import Launchers
from megatron.training.process.restarts import refuse_repeated_failure, start_through_launcher
from megatron.training.process.watchdog import Hangs, Watchdog, next_start_folder

if TYPE_CHECKING:
    from megatron.objectives.objective import Objective


def train_from(
    argv: Sequence[str], objective: ObjectiveName, *, description: str | None
) -> ExitCode:
    """Train by the command line `argv`; return the exit code.

    Args:
        description: the first lines of `--help`.

    Raises:
        MegatronError: something that the user can mend.
    """
    saved = checkpoint_flags(argv)
    try:
        config, notices = parse_config(
            argv, description=description or "", defaults=saved.flags if saved else None
        )
    except ConfigError as error:
        raise ConfigError(*error.problems, *lost_plugins(argv)) from error
    if saved:
        notices = (*notices, *saved.describe(config))
    launcher = read_launcher()
    start_through_launcher(config.training, argv, launcher)
    return train(config, config.plugins.objective or objective, notices=notices)


def train(
    config: Config,
    objective: "ObjectiveName | Objective",
    *,
    notices: Sequence[str] = (),
    hooks: Sequence[Hook] = (),
) -> ExitCode:
    """Train by `config` in this process, one rank of a launcher's or the only one.

    Args:
        objective: its name, or itself.
        hooks: act around steps, behind those of --hook.

    Raises:
        MegatronError: something that the user can mend.
    """
    launcher = read_launcher()
    # A step that is taken again leaves no trace in the run's directory.
    save = "" if config.guards.replay_step else config.checkpoint.save or ""
    refuse_repeated_failure(save, launcher)
    started = read_launch(config.parallel.local_rank)
    watchdog = Watchdog(
        FailureFile(save), rank=started.rank, launchers=Launchers(is_parent=bool(launcher.name))
    )
    limit_s = plan_watch(config.training, config.parallel).hang_timeout_s
    # Before the ranks can agree on a folder; both wrong values are refused later.
    if save and limit_s > 0:
        watchdog.arm(Hangs(limit_s, next_start_folder(Path(save)), started.world_size))
    with watchdog.watching():
        # Before torch, which takes seconds to import: errors are reported at once.
        name = objective if isinstance(objective, str) else objective.name
        valid = require_startable(config, world_size=started.world_size, objective=name)
        from megatron.training.process.device import prepare_process

        launch, device = prepare_process(config.parallel)
        from megatron.training.pretrain import pretrain

        if isinstance(objective, str):
            own = OBJECTIVES.flags_of(objective, config.extensions)
            built: Objective = OBJECTIVES.get(objective, own)()
            objective = built
        return pretrain(
            config, notices, launch, device, objective, watchdog, valid=valid, hooks=hooks
        )
