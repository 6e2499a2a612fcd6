"""Checks of flags and paths that need no torch, made before it is imported."""

import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from megatron.common.errors import ConfigError, WrongDataError, near
from megatron.config.config import Config
from megatron.config.data.corpora import SUFFIXES, prefixes_of
from megatron.config.data.objective import (
    ObjectiveName,
    declaration_of,
    objective_tokenizer_arguments,
)
from megatron.config.run.checkpoint import CheckpointConfig, plan_checkpoint
from megatron.config.run.evaluation import plan_evaluation
from megatron.config.validation import Validated, validate
from megatron.data.token_files.pair_files import existing_pair
from megatron.tokenizer.build import tokenizer_problems

_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def require_startable(config: Config, *, world_size: int, objective: ObjectiveName) -> Validated:
    """Return the validated config; refuse flags and paths that no device can do anything with.

    Where torch may find a GPU or none, what only a CPU refuses has to wait until it is known.

    Raises:
        ConfigError: lists every problem that is found without torch.
    """
    return validate(
        config,
        world_size=world_size,
        device="cuda" if _may_be_gpu(config.parallel.device) else "cpu",
        objective=objective,
        others=chain(
            tokenizer_problems(**objective_tokenizer_arguments(config.tokenizer, objective)),
            _path_problems(config, objective),
        ),
    )


def _may_be_gpu(wanted: str) -> bool:
    """Whether torch may find a GPU."""
    return wanted == "cuda" or (wanted == "auto" and any(map(os.path.exists, _GPU_FILES)))


def _path_problems(config: Config, objective: ObjectiveName) -> Iterator[str]:
    yield from _data_problems(config, SUFFIXES[declaration_of(objective).kind])
    # Without the names on the hub that --tokenizer-model of HuggingFaceTokenizer may hold.
    tokenizer = objective_tokenizer_arguments(config.tokenizer, objective)
    for name in ("vocab_file", "merge_file", "tokenizer_model"):
        flag, file = f"--{name.replace('_', '-')}", tokenizer.get(name) or ""
        is_path = os.sep in file if name == "tokenizer_model" else bool(file)
        if is_path and not os.path.exists(file):
            yield f"cannot read {flag} {file}: No such file or directory"
    trains = not plan_evaluation(config.evaluation).only
    planned = plan_checkpoint(config.checkpoint, trains=trains)
    if planned.load and planned.must_exist and not os.path.exists(planned.load):
        yield f"--load {planned.load}: there is no such directory{near(Path(planned.load))}"
    if trains and not config.guards.replay_step:
        yield from _save_problems(config.checkpoint)


def _data_problems(config: Config, suffixes: Sequence[str]) -> Iterator[str]:
    try:
        prefixes = prefixes_of(config.data, "documents")
    except ConfigError:
        return  # listed with the other problems
    for prefix in prefixes:
        if any(suffixes) and (problem := _misnamed(prefix, suffixes)):
            yield problem
            continue
        for suffix in suffixes:
            try:
                existing_pair(prefix + suffix)
            except WrongDataError as error:
                yield str(error)


def _misnamed(prefix: str, suffixes: Sequence[str]) -> str:
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
