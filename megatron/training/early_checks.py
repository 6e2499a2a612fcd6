"""Checks of flags and paths that need no torch, made before it is imported."""

import difflib
import os
from collections.abc import Iterator
from pathlib import Path

from megatron.common.errors import ConfigError, WrongDataError, raise_if_any
from megatron.config.config import Config
from megatron.config.data.data_plan import KIND_OF, prefixes_of
from megatron.config.data.objective_plan import ObjectiveName
from megatron.config.data.tokenizer_plan import gpt_tokenizer_arguments
from megatron.config.run.checkpoint import CheckpointConfig
from megatron.config.run.checkpoint_plan import plan_checkpoint
from megatron.config.run.evaluation_plan import plan_evaluation
from megatron.config.validation import check
from megatron.data.token_files.indexed_dataset import existing_pair
from megatron.tokenizer.build import tokenizer_problems

_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def require_startable(config: Config, *, world_size: int, objective: ObjectiveName) -> None:
    """Refuse flags and paths that no device can do anything with.

    Raises:
        ConfigError: lists every problem that is found without torch.
    """
    found = [
        _plan_problems(config, world_size, objective, device)
        for device in _devices(config.parallel.device)
    ]
    # What only one of the devices refuses has to wait until it is known which one it is.
    certain = [problem for problem in found[0] if all(problem in others for others in found)]
    raise_if_any([*certain, *_path_problems(config, objective)])


def _devices(wanted: str) -> tuple[str, ...]:
    """Return the devices that torch may find."""
    if wanted == "cpu" or (wanted == "auto" and not any(map(os.path.exists, _GPU_FILES))):
        return ("cpu",)
    return ("cuda",) if wanted == "cuda" else ("cuda", "cpu")


def _plan_problems(
    config: Config, world_size: int, objective: ObjectiveName, device: str
) -> tuple[str, ...]:
    others = tokenizer_problems(**gpt_tokenizer_arguments(config.tokenizer))
    try:
        check(config, world_size=world_size, device=device, objective=objective, others=others)
    except ConfigError as error:
        return error.problems
    return ()


def _path_problems(config: Config, objective: ObjectiveName) -> Iterator[str]:
    try:
        prefixes = prefixes_of(config.data, KIND_OF[objective])
    except ConfigError:
        prefixes = []  # listed with the other problems
    for prefix in prefixes:
        try:
            existing_pair(prefix)
        except WrongDataError as error:
            yield str(error)
    # Without the names on the hub that --tokenizer-model of HuggingFaceTokenizer may hold.
    tokenizer = gpt_tokenizer_arguments(config.tokenizer)
    for name in ("vocab_file", "merge_file", "tokenizer_model"):
        flag, file = f"--{name.replace('_', '-')}", tokenizer.get(name) or ""
        is_path = os.sep in file if name == "tokenizer_model" else bool(file)
        if is_path and not os.path.exists(file):
            yield f"cannot read {flag} {file}: No such file or directory"
    trains = not plan_evaluation(config.evaluation).only
    planned = plan_checkpoint(config.checkpoint, trains=trains)
    if planned.load and planned.must_exist and not os.path.exists(planned.load):
        yield f"--load {planned.load}: there is no such directory{_near(Path(planned.load))}"
    if trains and not config.guards.replay_step:
        yield from _save_problems(config.checkpoint)


def _near(missing: Path) -> str:
    """Return the hint at a directory beside `missing` with a similar name, if there is one."""
    try:
        names = [entry.name for entry in missing.parent.iterdir() if entry.is_dir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(missing.name, names, n=1)
    return f"; did you mean {missing.parent / near[0]}?" if near else ""


def _save_problems(checkpoint: CheckpointConfig) -> Iterator[str]:
    if not checkpoint.save:
        return
    save = Path(checkpoint.save)
    there = next((path for path in (save, *save.absolute().parents) if os.path.exists(path)), None)
    if there and not there.is_dir():
        yield f"--save {save}: {there} is a file; give a directory"
    elif there and not os.access(there, os.W_OK | os.X_OK):
        yield f"--save {save}: nothing can be written to {there}; give another directory"
