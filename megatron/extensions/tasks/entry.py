"""Token and text classification and question answering from a command line.

Other extensions read settings of other programs in it, with a function `task_flags` of their flags.py.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from multiprocessing import get_context
from pathlib import Path

from megatron.checkpointing.manifest import published_tags
from megatron.checkpointing.megatron_lm.detect import system_of, title_of
from megatron.checkpointing.remote import downloaded, fetch, local_directory
from megatron.checkpointing.saved_run import read_saved_run, saved_architecture, saved_network
from megatron.common.atomic_files import replace_text
from megatron.common.errors import ConfigError, ExitCode, WrongCheckpointError, near
from megatron.common.extensions import declarations_in
from megatron.common.registry import LOADERS, import_dotted
from megatron.common.remote_files import is_url
from megatron.config.architecture.architecture import network_named
from megatron.config.config import Config, flatten, parse_conversion, words_of
from megatron.config.data.objective import ObjectiveName
from megatron.config.objectives import declaration_of
from megatron.config.parsing.files import Values
from megatron.config.parsing.near_misses import field_of
from megatron.config.parsing.parser import Given, peek
from megatron.config.run.urls import cache_of, urls_in
from megatron.config.tools.checkpoint_tools import ConversionConfig
from megatron.extensions.tasks.data.text_flags import TextTaskConfig
from megatron.extensions.tasks.flags import SECTIONS, objective_of
from megatron.training.entry import train_from
from megatron.training.process.environment import read_launch

log = logging.getLogger(__name__)

CONVERTED = "pretrained"
"""Folder in --save of a pretrained network that was converted from another format."""

_SOURCE = "source.txt"
_LONGEST_CONVERSION_S = 3600
_TOKENIZER = (
    *("tokenizer_type", "tokenizer_name_or_path", "tokenizer_model", "tokenizer_kwargs"),
    *("vocab_file", "merge_file", "vocab_size"),
)
"""Fields of a tokenizer's type and files."""


def train_text_task(argv: Sequence[str], task: str, *, description: str | None) -> ExitCode:
    """Finetune on a task, or evaluate, by flags and settings; return the exit code.

    Sizes of the network and its tokenizer come from --pretrained-checkpoint or --load, where
    `argv` has no flags for them.

    Args:
        task: name of --task.

    Raises:
        MegatronError: a user error.
    """
    launch = read_launch(None)
    words = [*argv]
    for flags_of in declarations_in("flags", "task_flags"):
        words = flags_of(words, task, world_size=launch.world_size)
    is_first = launch.rank == 0
    words = with_pretrained_network([f"--task={task}", *words], is_first=is_first)
    given = peek(words)
    load = given.get("load")
    if load and load != given.get("save") and not Path(load).exists():
        raise WrongCheckpointError(f"--load {load}: there is no such path{near(Path(load))}")
    if load and Path(load).exists() and system_of(Path(load)) in LOADERS:
        words += _tokenizer_of(Path(load), given, is_first=is_first)
        words.append(f"--load={_converted_folder(Path(load), words, is_first=is_first)}")
    if load:
        words.append("--use-checkpoint-args")
    return train_from(words, objective_in(words, task), description=description)


def objective_in(words: Sequence[str], task: str) -> ObjectiveName:
    """Return the objective that the network in --pretrained-checkpoint or --load learns a task with.

    Without a checkpoint that is a BERT.

    Raises:
        WrongCheckpointError: no network of this architecture learns it.
    """
    given = peek(words)
    for flag in ("--pretrained-checkpoint", "--load"):
        folder = given.get(field_of(flag))
        architecture = saved_architecture(Path(folder)) if folder else None
        if folder and architecture:
            objective = objective_of(task, causal=network_named(architecture).is_causal)
            if declaration_of(objective).network != architecture:
                raise WrongCheckpointError(
                    f"{flag} {folder} holds a {architecture.upper()}, which does not learn --task "
                    f"{task}: give a {declaration_of(objective).network.upper()}"
                )
            return objective
    return objective_of(task)


def with_pretrained_network(words: Sequence[str], *, is_first: bool) -> list[str]:
    """Return `words` with the flags of the network in --pretrained-checkpoint in front.

    A network of Megatron-LM or transformers is converted to --save first.

    Args:
        is_first: whether this process converts; other processes wait for it.

    Raises:
        WrongCheckpointError: there is no checkpoint, or none of a format that can be read.
        ConfigError: --save is missing, where a network is converted.
    """
    words = _with_local_directories(words)
    given = peek(words)
    name = given.get("pretrained_checkpoint")
    if name is None:
        return [*words]
    source = Path(name)
    words = [*words, *_tokenizer_of(source, given, is_first=is_first)]
    folder = source if _is_own(source) else _converted_folder(source, words, is_first=is_first)
    given, saved = peek(words), saved_network(folder)
    flags: Mapping[str, object] = saved.flags if saved else {}
    saved_type = flags.get("tokenizer_type")
    if saved_type and given.get("tokenizer_type") not in (None, saved_type):
        # Files of one type mean nothing to another.
        flags = {field: value for field, value in flags.items() if field not in _TOKENIZER}
    if flatten(read_saved_run(str(folder)).config).get("task") != given.get("task"):
        # Labels and options of another task.
        names = {field.name for field in fields(TextTaskConfig)}
        flags = {field: value for field, value in flags.items() if field not in names}
    return [*words_of(flags), *words, f"--pretrained-checkpoint={folder}"]


def _tokenizer_of(source: Path, given: Given, *, is_first: bool) -> list[str]:
    """Return the flags of the tokenizer in a checkpoint of another program, unless another is given.

    Its vocabulary is written to --save.

    Raises:
        WrongCheckpointError: it is no archive, or has no vocabulary.
    """
    save = given.get("save")
    system = system_of(source)
    if system not in LOADERS or given.get("vocab_file") or save is None:
        return []
    found = import_dotted(LOADERS.about(str(system)).tokenizer_in)(source)
    if found is None:
        return []
    kind, vocabulary = found
    file = Path(save) / f"{CONVERTED}-vocab.txt"
    if is_first:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, vocabulary.decode("utf-8"))
    return [f"--tokenizer-type={kind}", f"--vocab-file={file}"]


def _with_local_directories(words: Sequence[str]) -> list[str]:
    """Return `words` with local directories for checkpoints at URLs; download those to load."""
    given, local = peek(words), [*words]
    cache = cache_of(urls_in(given))
    for flag in ("--pretrained-checkpoint", "--load", "--save"):
        path = given.get(field_of(flag))
        if path and is_url(path):
            directory = Path(local_directory(path, cache, flag=flag))
            if flag != "--save":
                # Files without a manifest that this run uploads are no checkpoint of another system.
                fetch(directory, foreign=path != given.get("save"))
            local.append(f"{flag}={downloaded(directory)}")
    return local


def _is_own(source: Path) -> bool:
    """Whether `source` is a checkpoint of this program.

    Raises:
        WrongCheckpointError: it is missing, or its format is not recognized.
    """
    if not source.exists():
        raise WrongCheckpointError(
            f"--pretrained-checkpoint {source}: there is no such file or directory{near(source)}"
        )
    system, others = system_of(source), LOADERS.with_extensions()
    if system not in ("own", "megatron", "hugging_face", *others):
        programs = ", ".join(["Megatron-LM", *(LOADERS.about(name).program for name in others)])
        what = f"is {title_of(system)}" if system else "holds no checkpoint of a known format"
        raise WrongCheckpointError(
            f"--pretrained-checkpoint {source} {what}: give a checkpoint of this program, of "
            f"{programs} or transformers"
        )
    return system == "own"


def _converted_folder(source: Path, words: Sequence[str], *, is_first: bool) -> Path:
    """Return the folder in --save with the weights of `source`, which this process converts or awaits.

    Raises:
        ConfigError: there is no --save.
        WrongCheckpointError: the folder holds another network, or the conversion takes too long.
    """
    save = peek(words).get("save")
    if save is None:
        raise ConfigError(f"{source} is converted to a folder of --save, which is missing")
    folder = Path(save) / CONVERTED
    record, identity = folder / _SOURCE, str(source.resolve())
    if not is_first:
        began_at = time.monotonic()
        while not record.is_file():
            if time.monotonic() - began_at > _LONGEST_CONVERSION_S:
                raise WrongCheckpointError(
                    f"{folder}: the first process has not converted {source}"
                )
            time.sleep(1)
        return folder
    if record.is_file() and (found := record.read_text(encoding="utf-8")) != identity:
        raise WrongCheckpointError(
            f"{folder} holds the weights of {found}, not of {identity}: give another --save"
        )
    if not record.is_file():
        # In a separate process: a conversion makes process groups of one rank.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            for line in pool.submit(_convert, source, folder, [*map(str, words)]).result():
                log.info(line)
        if not published_tags(folder):
            raise WrongCheckpointError(f"{folder} holds no checkpoint after the conversion")
        replace_text(record, identity)
    return folder


def _convert(source: Path, folder: Path, words: Sequence[str]) -> list[str]:
    """Convert a network of another program to our format; return messages for the user."""
    # Imported here: torch takes seconds.
    from megatron.checkpointing.megatron_lm.convert import Conversion, convert

    flags = ("--model-type=BERT", f"--load-dir={source}", f"--save-dir={folder}")

    def parse(found: Values) -> Config:
        # The task comes from the network that is converted.
        own_task = parse_conversion(found, flags, ConversionConfig).config
        config = parse_conversion(found, [*words, *flags], ConversionConfig).config
        task_sections = {
            name: own_task.extensions.get(name, kind()) for name, kind in SECTIONS.items()
        }
        return replace(config, extensions={**config.extensions, **task_sections})

    given = peek(words)
    heads = given.get("num_attention_heads")
    conversion = Conversion(
        source=source,
        output=folder,
        saver="own",
        flags=("", ""),
        heads=int(heads) if heads and heads.isdecimal() else None,
        architecture=None,
        task=given.get("task"),
    )
    return [*convert(conversion, parse)]
