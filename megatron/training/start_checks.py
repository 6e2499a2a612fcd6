"""Checks of flags, paths and the checkpoint to load, before torch, which takes seconds to import."""

import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from megatron.checkpointing.manifest import published_tags
from megatron.checkpointing.saved_run import (
    is_model_of_transformers,
    manifest_to_load,
    model_to_import,
    saved_progress,
)
from megatron.common.errors import (
    CheckpointError,
    ConfigError,
    UnreadableCheckpointError,
    WrongDataError,
    near,
)
from megatron.common.remote_files import is_url
from megatron.config.checks.start import Start
from megatron.config.config import Config
from megatron.config.data.corpora import prefixes_of
from megatron.config.data.objective import ObjectiveName
from megatron.config.objectives import declaration_of, objective_tokenizer_arguments
from megatron.config.plan.plan import resolve
from megatron.config.plan.validation import validate
from megatron.config.run.checkpoint import CheckpointPlan, plan_checkpoint, replacement_problems
from megatron.config.run.evaluation import takes_steps
from megatron.config.run.logging import LoggingConfig
from megatron.data.token_files.pair_files import existing_pair
from megatron.training.checkpoints.checkpoint_fit import require_fit

_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def require_startable(
    config: Config, *, world_size: int, objective: ObjectiveName, is_rank_0: bool = True
) -> Start:
    """Return the validated config; refuse flags, paths and checkpoints that do not go together.

    Where torch may find a GPU or none, what only a CPU refuses has to wait until it is known.

    Args:
        is_rank_0: only this rank writes scalars, maybe where others have no folder.

    Raises:
        ConfigError: lists every problem of flags and paths that is found without torch.
        WrongCheckpointError: --load holds the checkpoint of another run; lists every difference.
    """
    # Imports numpy, which --help does not need.
    from megatron.tokenizer.build import tokenizer_problems

    start = validate(
        config,
        world_size=world_size,
        device="cuda" if _may_be_gpu(config.parallel.device) else "cpu",
        objective=objective,
        done=saved_progress(config.checkpoint),
        others=chain(
            tokenizer_problems(**objective_tokenizer_arguments(config.tokenizer, objective)),
            _default_tokenizer_problems(config),
            _path_problems(config, objective),
            _log_problems(config.logging) if is_rank_0 else (),
        ),
    )
    _require_fitting_checkpoint(start)
    return start


def _require_fitting_checkpoint(start: Start) -> None:
    """Refuse to load the checkpoint of another run.

    The newest manifest of --load decides, with its vocabulary; what is loaded is chosen later, and
    compared with that of the tokenizer.

    Raises:
        WrongCheckpointError: lists every difference.
    """
    found = manifest_to_load(start.config.checkpoint)
    if (
        found is None
        or start.config.guards.replay_step
        or start.config.checkpoint.universal_checkpoint
    ):
        return
    folder, manifest = found
    try:
        decided = resolve(start, vocab_size=manifest.spec.vocabulary.vocab_size)
    except (CheckpointError, ConfigError):
        return  # named with the tokenizer's vocabulary, or by what chooses a checkpoint
    require_fit(decided, folder, manifest)


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
    if trains and planned.save and not config.guards.replay_step:
        problems = [*_save_problems(planned.save)]
        # Under --elastic a process that is left over may start after the run has saved.
        if not problems and planned.load != planned.save and not config.parallel.elastic:
            problems = [*_replacement_problems(planned)]
        yield from problems


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
    """Return the error of a file or a folder of text in place of token files."""
    path = Path(prefix)
    is_file = path.suffix in (".jsonl", ".json", ".txt", ".parquet") and path.is_file()
    is_made = any(os.path.exists(f"{prefix}{suffix}.idx") for suffix in suffixes)
    if is_made or not (is_file or path.is_dir()):
        return ""
    chat = "_tokens_document" in suffixes
    made = f"{path.with_suffix('')}{'' if any(suffixes) else '_text_document'}"
    return (
        f"--data-path {prefix} is a {'file' if is_file else 'folder'} of text, and training reads token files: "
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


def _log_problems(logging: LoggingConfig) -> Iterator[str]:
    for flag, directory in (
        ("--tensorboard-dir", logging.tensorboard_dir),
        ("--codecarbon-dir", logging.codecarbon_dir),
    ):
        if not directory or is_url(directory):  # TensorBoard writes to URLs by itself
            continue
        if problem := _unwritable(flag, Path(directory)):
            yield problem


def _save_problems(directory: str) -> Iterator[str]:
    save = Path(directory)
    if problem := _unwritable("--save", save):
        yield problem
    elif save.exists() and not os.access(save, os.R_OK):
        yield f"--save {save} cannot be read; give another directory"
    elif is_model_of_transformers(save):
        yield (
            f"--save {save} is the folder of a model of Hugging Face (config.json and weights): give "
            "another directory; tools/convert_checkpoint/from_hf.py imports the model for --load"
        )


def _unwritable(flag: str, directory: Path) -> str:
    """Return the error of a directory in which nothing can be made."""
    above = (directory, *directory.absolute().parents)
    there = next((path for path in above if os.path.lexists(path)), None)
    if there is None:
        return ""
    if not there.exists():
        return f"{flag} {directory}: {there} is a link to {os.readlink(there)}, which is not there"
    if not there.is_dir():
        return f"{flag} {directory}: {there} is a file; give a directory"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{flag} {directory}: nothing can be written to {there}; give another directory"
    return ""


def _replacement_problems(planned: CheckpointPlan) -> Iterator[str]:
    try:
        yield from replacement_problems(planned, published_tags(Path(planned.save)))
    except UnreadableCheckpointError as error:
        yield f"--save {planned.save}: {error}"
