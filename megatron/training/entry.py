"""Common code of the entry scripts: from a command line to the training of one objective.

Flags and paths are checked before torch, which takes seconds to import.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.checkpointing.saved_run import checkpoint_flags, lost_plugins, source_of_sizes
from megatron.common.errors import ConfigError, ExitCode, before_the_first_step
from megatron.common.registry import OBJECTIVES
from megatron.config.config import Config, options_given, parse_config
from megatron.config.data.objective import ObjectiveName
from megatron.config.data.tokenizer import without_idle_fields
from megatron.config.objectives import declaration_of
from megatron.training.loop.loop import Hook
from megatron.training.prepare import local_save, prepare
from megatron.training.process.environment import Launch, read_launch, read_launcher, start_name
from megatron.training.process.failure import FailureFile
from megatron.training.process.launchers import Launchers
from megatron.training.process.restarts import refuse_repeated_failure, start_through_launcher
from megatron.training.process.starting_peers import StartingPeers
from megatron.training.process.watchdog import Hangs, Watchdog, next_start_folder
from megatron.training.start_checks import require_startable

if TYPE_CHECKING:
    from megatron.objectives.objective import Objective

_FLAG = re.compile(r"--[\w-]+")


def train_from(
    argv: Sequence[str], objective: ObjectiveName, *, description: str | None
) -> ExitCode:
    """Train by the command line `argv`; return the exit code.

    Args:
        description: the first lines of `--help`.

    Raises:
        MegatronError: a user error.
    """
    saved = checkpoint_flags(argv, objective)
    given = options_given(argv)
    flags = declaration_of(objective).saved_flags(given, saved.flags if saved else {})
    try:
        config, notices = parse_config(
            argv,
            objective=objective,
            description=description or "",
            defaults=flags,
            saved_sections=saved.sections if saved else (),
        )
    except ConfigError as error:
        raise ConfigError(
            *error.problems, *lost_plugins(argv), *source_of_sizes(given, error.problems)
        ) from error
    if saved:
        notices = (*notices, *replace(saved, flags=flags).describe(config))
    launcher = read_launcher()
    start_through_launcher(config.training, argv, launcher)
    objective = config.plugins.objective or objective
    objective = declaration_of(objective).objective_to_train(config, objective)
    try:
        return train(config, objective, notices=notices)
    except ConfigError as error:
        raise ConfigError(*error.problems, *_spellings_in(error.problems, notices)) from error


def _spellings_in(problems: Sequence[str], notices: Sequence[str]) -> Iterator[str]:
    """Yield the notices of flags that were read as ones which `problems` name."""
    named = {flag for problem in problems for flag in _FLAG.findall(problem)}
    for notice in notices:
        _, is_read, ours = notice.partition(": read as ")
        if is_read and named.intersection(_FLAG.findall(ours)):
            yield notice


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
        hooks: act around steps, after the hooks of --hook.

    Raises:
        MegatronError: a user error.
    """
    launcher = read_launcher()
    tokenizer, idle = without_idle_fields(config.tokenizer)
    config, notices = replace(config, tokenizer=tokenizer), [*notices, *idle]
    # A step that is taken again leaves no trace in the run's directory.
    with before_the_first_step():
        save = "" if config.guards.replay_step else local_save(config)
    refuse_repeated_failure(save, launcher)
    started = read_launch(config.parallel.local_rank)
    name = objective if isinstance(objective, str) else objective.name
    watchdog = Watchdog(
        FailureFile(save),
        rank=started.rank,
        launchers=Launchers(is_parent=bool(launcher.name)),
        starting=_starting_peers(started),
    )
    with watchdog.watching():
        limit_s = config.training.hang_timeout or 0
        # Before the ranks can agree on a folder; both wrong values are refused later.
        if save and limit_s > 0:
            watchdog.arm(Hangs(limit_s, next_start_folder(Path(save)), started.world_size))
        # Before torch, which takes seconds to import: errors are reported at once.
        with before_the_first_step():
            config = prepare(config, name, world_size=started.world_size)
        start = require_startable(
            config, world_size=started.world_size, objective=name, is_rank_0=not started.rank
        )
        from megatron.training.process.device import prepare_process

        launch, device = prepare_process(config.parallel, world_size=start.world_size)
        if launch.rank >= launch.world_size:
            from megatron.training.process.spares import wait_for_end

            watchdog.enter_stage("meeting the other processes")
            return wait_for_end(launch, look=watchdog.raise_if_over, met=watchdog.disarm)
        from megatron.training.pretrain import pretrain

        built = _build(objective, config) if isinstance(objective, str) else objective
        code = pretrain(start, launch, device, built, watchdog, notices=notices, hooks=hooks)
        if launch.spares and launch.rank == 0:
            from megatron.training.process.spares import release_spares

            release_spares(launch)
        return code


def _build(name: ObjectiveName, config: Config) -> "Objective":
    objective: Objective = OBJECTIVES.get(name, OBJECTIVES.flags_of(name, config.extensions))()
    return objective


def _starting_peers(started: Launch) -> StartingPeers | None:
    """Return the watch over the other processes that a launcher starts; None without any."""
    return StartingPeers(started.rank, start_name(started)) if started.processes > 1 else None
