"""Resolve --load to a checkpoint or a Hugging Face model, and merge its config with the flags.

Needs no torch for a checkpoint.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpointing.manifest import MANIFEST, Manifest, published_tags, read_manifest
from megatron.checkpointing.publish import checkpoint_of
from megatron.checkpointing.remote import local_checkpoint, remote_tags, url_of
from megatron.common.errors import (
    CheckpointError,
    ConfigError,
    WrongCheckpointError,
    may_pass,
    near,
    raise_if_any,
)
from megatron.config.config import (
    Config,
    flag_problems,
    options_given,
    parse_config_for_checkpoint,
)
from megatron.config.data.objective import ObjectiveName
from megatron.config.inference.generation import LAYOUT
from megatron.config.objectives import declaration_of, objective_tokenizer_arguments
from megatron.config.parsing.flags import HELP
from megatron.config.parsing.titles import BASICS_OF_MODELS
from megatron.config.run.urls import cache_of, urls_in

if TYPE_CHECKING:
    from megatron.checkpointing.resharding.sharded_tensor import FullCheckpoint

log = logging.getLogger(__name__)

Weights = Callable[[], AbstractContextManager["FullCheckpoint"]]

PRINTS_AND_EXITS = HELP | {"--help-legacy", "--version"}
"""Flags of programs that print and end."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model to load, and the config to load it with.

    Args:
        folder: a checkpoint, or a model in transformers' format.
        manifest: of the checkpoint, or of the import of the transformers model.
        own: the tool's config sections, by name.
        given: names of the flags on the command line.
        weights: opens the weights.
    """

    folder: Path
    manifest: Manifest
    config: Config
    own: Mapping[str, Any]
    given: Collection[str]
    weights: Weights


def read_model_source(
    argv: Sequence[str], sections: Mapping[str, type], *, description: str | None
) -> ModelSource:
    """Return the model in --load (of several checkpoints the newest) with the config of `argv`.

    Flags default to the training run's values, except for layout flags.

    Args:
        sections: the tool's config sections, by name.

    Raises:
        ConfigError: a flag is unknown, refused or malformed, or --load is missing.
        WrongCheckpointError: there is no model in --load.
    """
    parse = partial(
        parse_config_for_checkpoint,
        extra=sections,
        description=description or "",
        basics=BASICS_OF_MODELS,
    )
    if PRINTS_AND_EXITS & set(argv):
        parse(argv, {})  # prints and exits
    given = options_given(argv)
    load = given.get("load")
    problems = [*flag_problems(argv, sections)]
    if load is None:
        problems.append("--load is missing: the directory that a run saved to with --save")
        raise ConfigError(*problems)
    raise_if_any(problems)
    folder, manifest, weights = _model_in(local_checkpoint(load, cache_of(urls_in(given))))
    trained = {
        section: {name: value for name, value in fields.items() if name not in LAYOUT}
        for section, fields in manifest.config.items()
    }
    config, own = parse(argv, trained)
    log.info("loading %s", folder)
    return ModelSource(
        folder=folder, manifest=manifest, config=config, own=own, given=given, weights=weights
    )


def tokenizer_arguments_of(source: ModelSource, objective: ObjectiveName) -> dict[str, Any]:
    """Return the arguments of `build_tokenizer` for a model of an objective.

    An objective that adds special tokens leaves none to a tokenizer that adds them by itself.
    """
    arguments = objective_tokenizer_arguments(source.config.tokenizer, objective)
    adds_them = declaration_of(objective).adds_special_tokens
    if adds_them and arguments["tokenizer_type"] == "PretrainedFromHF":
        arguments["tokenizer_hf_no_include_special_tokens"] = True
    return arguments


def tokenizer_advice(source: ModelSource, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield what to write where flags of another tokenizer are given without --tokenizer-type.

    Args:
        arguments: of `build_tokenizer`.
    """
    if "tokenizer_type" not in source.given and not arguments.keys().isdisjoint(source.given):
        yield (
            f"the tokenizer of {source.folder} is of --tokenizer-type {arguments['tokenizer_type']}: "
            "leave the flags of the tokenizer out to take it, or write --tokenizer-type too to take "
            "another one"
        )


def _model_in(directory: Path) -> tuple[Path, Manifest, Weights]:
    # Weight readers are imported when they are needed: torch takes seconds to import.
    if not directory.exists():
        raise WrongCheckpointError(f"--load {directory} does not exist{near(directory)}")
    folder = checkpoint_of(directory)
    if (folder / MANIFEST).is_file():
        with _damage_names_others(folder):
            manifest = read_manifest(folder)

        def read() -> "AbstractContextManager[FullCheckpoint]":
            from megatron.checkpointing.resharding.universal import read_checkpoint

            with _damage_names_others(folder):
                return nullcontext(read_checkpoint(folder, manifest, optimizer=False))

        return folder, manifest, read
    if not (directory / "config.json").is_file():
        raise WrongCheckpointError(
            f"--load {directory} holds no complete checkpoint and no transformers model; give the "
            "directory that a run saved to with --save"
        )
    from megatron.checkpointing.hugging_face.import_model import (
        ImportOptions,
        describe_model,
        open_weights,
    )

    described = describe_model(directory, ImportOptions(), save=directory)
    return directory, described.manifest, partial(open_weights, directory, described)


@contextmanager
def _damage_names_others(folder: Path) -> Iterator[None]:
    """Add what to load instead to the error of a damaged checkpoint."""
    try:
        yield
    except CheckpointError as error:
        if error.is_final or may_pass(error):
            raise  # of another version, or on a disk that cannot be read
        others = _others_beside(folder)
        remedy = (
            f"try --load {others[0]}, another checkpoint of the run"
            if others
            else "copy it again from where it is intact"
        )
        raise CheckpointError(f"{error}; {remedy}") from error


def _others_beside(folder: Path) -> list[str]:
    """Return the other checkpoints of the run as --load takes them, newest first; [] if not known."""
    if url_of(folder):
        return []  # the one checkpoint at its URL
    url = url_of(folder.parent)
    try:
        tags = remote_tags(url) if url else published_tags(folder.parent)
    except (OSError, CheckpointError):
        return []
    return [f"{url or folder.parent}/{tag}" for tag in tags if tag != folder.name]
