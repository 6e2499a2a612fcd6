"""Common code of the entry scripts: from a command line to the training of one objective.

Flags and paths are checked here before torch, which takes seconds to import.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.checkpointing.saved_run import (
    checkpoint_flags,
    is_model_of_transformers,
    lost_plugins,
    model_to_import,
    saved_progress,
    source_of_sizes,
)
from megatron.common.errors import (
    ConfigError,
    ExitCode,
    WrongDataError,
    before_the_first_step,
    near,
)
from megatron.common.registry import OBJECTIVES
from megatron.config.checks.start import Start
from megatron.config.config import Config, options_given, parse_config
from megatron.config.data.corpora import prefixes_of
from megatron.config.data.objective import ObjectiveName
from megatron.config.objectives import declaration_of, objective_tokenizer_arguments
from megatron.config.plan.validation import validate
from megatron.config.run.checkpoint import CheckpointConfig, plan_checkpoint
from megatron.config.run.evaluation import takes_steps
from megatron.data.token_files.pair_files import existing_pair
from megatron.training.loop.loop import Hook
from megatron.training.prepare import local_save, prepare
from megatron.training.process.environment import (
    read_launch,
    read_launcher,
    start_name,
)
from megatron.training.process.failure import FailureFile
from megatron.training.process.launchers import Launchers
from megatron.training.process.restarts import refuse_repeated_failure, start_through_launcher
from megatron.training.process.starting_peers import StartingPeers
from megatron.training.process.watchdog import Hangs, Watchdog, next_start_folder

if TYPE_CHECKING:
    from megatron.objectives.objective import Objective

_FLAG = re.compile(r"--[\w-]+")
_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


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
        starting=StartingPeers(started.rank, start_name(started))
        if started.processes > 1
        else None,
    )
    with watchdog.watching():
        limit_s = config.training.hang_timeout or 0
        # Before the ranks can agree on a folder; both wrong values are refused later.
        if save and limit_s > 0:
            watchdog.arm(Hangs(limit_s, next_start_folder(Path(save)), started.world_size))
        # Before torch, which takes seconds to import: errors are reported at once.
        with before_the_first_step():
            config = prepare(config, name, world_size=started.world_size)
        start = require_startable(config, world_size=started.world_size, objective=name)
        from megatron.training.process.device import prepare_process

        launch, device = prepare_process(config.parallel, world_size=start.world_size)
        if launch.rank >= launch.world_size:
            from megatron.training.process.spares import wait_for_end

            watchdog.enter_stage("meeting the other processes")
            return wait_for_end(launch, look=watchdog.raise_if_over, met=watchdog.disarm)
        from megatron.training.pretrain import pretrain

        if isinstance(objective, str):
            flags = OBJECTIVES.flags_of(objective, config.extensions)
            built: Objective = OBJECTIVES.get(objective, flags)()
            objective = built
        code = pretrain(start, launch, device, objective, watchdog, notices=notices, hooks=hooks)
        if launch.spares and launch.rank == 0:
            from megatron.training.process.spares import release_spares

            release_spares(launch)
        return code


def require_startable(config: Config, *, world_size: int, objective: ObjectiveName) -> Start:
    """Return the validated config; refuse flags and paths that no device can do anything with.

    Where torch may find a GPU or none, what only a CPU refuses has to wait until it is known.

    Raises:
        ConfigError: lists every problem that is found without torch.
    """
    # Imports numpy, which --help does not need.
    from megatron.tokenizer.build import tokenizer_problems

    return validate(
        config,
        world_size=world_size,
        device="cuda" if _may_be_gpu(config.parallel.device) else "cpu",
        objective=objective,
        done=saved_progress(config.checkpoint),
        others=chain(
            tokenizer_problems(**objective_tokenizer_arguments(config.tokenizer, objective)),
            _default_tokenizer_problems(config),
            _path_problems(config, objective),
        ),
    )


def _default_tokenizer_problems(config: Config) -> Iterator[str]:
    """Yield how random tokens get by without the files of the default tokenizer."""
    given = config.tokenizer
    if config.data.mock_data and not (given.tokenizer_type or given.vocab_file):
        yield (
            "--mock-data needs no files of a tokenizer: write --tokenizer-type NullTokenizer and the "
            "number of tokens in --vocab-size"
        )


def _may_be_gpu(wanted: str) -> bool:
    """Whether torch may find a GPU."""
    return wanted == "cuda" or (wanted == "auto" and any(map(os.path.exists, _GPU_FILES)))


def _path_problems(config: Config, objective: ObjectiveName) -> Iterator[str]:
    yield from declaration_of(objective).path_problems(config)
    yield from _data_problems(config, declaration_of(objective).suffixes)
    # Without the names on the hub that --tokenizer-model of HuggingFaceTokenizer may hold.
    tokenizer = objective_tokenizer_arguments(config.tokenizer, objective)
    for name in ("vocab_file", "merge_file", "tokenizer_model"):
        flag, file = f"--{name.replace('_', '-')}", tokenizer.get(name) or ""
        is_path = os.sep in file if name == "tokenizer_model" else bool(file)
        if is_path and not os.path.exists(file):
            yield f"cannot read {flag} {file}: No such file or directory"
    trains = takes_steps(config.evaluation)
    planned = plan_checkpoint(config.checkpoint, trains=trains)
    if planned.load and planned.must_exist and not os.path.exists(planned.load):
        yield f"--load {planned.load}: there is no such directory{near(Path(planned.load))}"
    elif planned.load:
        yield from model_to_import(planned.load)
    if trains and not config.guards.replay_step:
        yield from _save_problems(config.checkpoint)


def _data_problems(config: Config, suffixes: Sequence[str]) -> Iterator[str]:
    try:
        prefixes = prefixes_of(config.data, "documents")
    except ConfigError:
        return  # listed with the other problems
    for prefix in prefixes:
        if problem := _text_problem(prefix, suffixes):
            yield problem
            continue
        if any(suffixes) and (problem := _misnamed_problem(prefix, suffixes)):
            yield problem
            continue
        for suffix in suffixes:
            try:
                existing_pair(prefix + suffix)
            except WrongDataError as error:
                yield str(error)


def _text_problem(prefix: str, suffixes: Sequence[str]) -> str:
    """Return the error of a file of text in place of token files."""
    path = Path(prefix)
    if path.suffix not in (".jsonl", ".json", ".txt", ".parquet") or not path.is_file():
        return ""
    chat = "_tokens_document" in suffixes
    made = f"{path.with_suffix('')}{'' if any(suffixes) else '_text_document'}"
    return (
        f"--data-path {prefix} is a file of text, and training reads token files: "
        f"tools/preprocess_data.py{' --conversations' if chat else ''} --input {prefix} "
        f"--output-prefix {path.with_suffix('')} with the flags of the tokenizer makes them; then "
        f"write --data-path {made}"
    )


def _misnamed_problem(prefix: str, suffixes: Sequence[str]) -> str:
    """Return the error of a prefix that names one of several token files, or other ones."""
    pair = prefix.removesuffix(".bin").removesuffix(".idx")
    both = " and ".join(f"PREFIX{suffix}" for suffix in suffixes)
    for suffix in suffixes:
        if pair.endswith(suffix):
            shared = pair.removesuffix(suffix)
            return f"{prefix} is one of the token files {both}: give the prefix alone: {shared}"
    if os.path.exists(f"{pair}.idx"):
        return f"{prefix} holds documents, and this program needs the token files {both}"
    return ""


def _save_problems(checkpoint: CheckpointConfig) -> Iterator[str]:
    if not checkpoint.save:
        return
    save = Path(checkpoint.save)
    there = next((path for path in (save, *save.absolute().parents) if os.path.exists(path)), None)
    if there and not there.is_dir():
        yield f"--save {save}: {there} is a file; give a directory"
    elif there and not os.access(there, os.W_OK | os.X_OK):
        yield f"--save {save}: nothing can be written to {there}; give another directory"
    elif is_model_of_transformers(save):
        yield (
            f"--save {save} is the folder of a model of Hugging Face (config.json and weights): give "
            "another directory; tools/convert_checkpoint/from_hf.py imports the model for --load"
        )
