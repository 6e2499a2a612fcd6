"""Retro project that is being preprocessed: its settings, the links to its data, its tokenizer."""

import filecmp
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.common.atomic_files import replace_text, replacing
from megatron.common.errors import ConfigError, DataError, raise_if_any
from megatron.config.data.tokenizer import TokenizerConfig, tokenizer_arguments
from megatron.config.parsing.flags import Parsed, finite_or_none, parse_sections
from megatron.config.parsing.parser import peek
from megatron.data.sampling.splits import split_ranges
from megatron.data.token_files.block_digests import digests_path
from megatron.data.token_files.indexed_dataset import IndexedDataset, open_token_files
from megatron.data.token_files.pair_files import pair_of
from megatron.data.token_files.publish import write_errors_name
from megatron.extensions.retro.retrieval.blocks import Ranks
from megatron.extensions.retro.retrieval.flags import (
    KEPT,
    RETRO_LEGACY,
    RetroPreprocessingConfig,
    contradictions_with,
)
from megatron.tokenizer.build import tokenizer_problems
from megatron.tokenizer.fingerprint import record_path

_DIGESTS = "retro_data_digests"
_NEIGHBORS = "retro_neighbor_dirs"


@dataclass(frozen=True)
class Project:
    """A Retro project directory whose settings, data and tokenizer are in place.

    Args:
        settings: the content of its config.json, without the folders of neighbors.
    """

    directory: Path
    config: RetroPreprocessingConfig
    settings: Mapping[str, Any]

    @cached_property
    def names(self) -> list[str]:
        """Names of the token files in data/, in the order of their numbers in chunks."""
        return [name for name, _ in _parts(self.settings["retro_gpt_data_path"])]

    @cached_property
    def ratios(self) -> list[float]:
        """Weight of each of the token files, divided by their sum."""
        weights = [weight for _, weight in _parts(self.settings["retro_gpt_data_path"])]
        return [weight / sum(weights) for weight in weights]

    @cached_property
    def datasets(self) -> list[IndexedDataset]:
        """The token files."""
        return [open_token_files(self.directory / "data" / name) for name in self.names]

    def num_training_documents(self, dataset: IndexedDataset) -> int:
        """Return how many documents the samples of training are of: the first ones."""
        config: RetroPreprocessingConfig = self.config
        order = config.retro_gpt_sample_order
        return split_ranges(config.retro_gpt_split, len(dataset), order)[0].stop

    @property
    def tokenizer_arguments(self) -> dict[str, Any]:
        """Arguments of `build_tokenizer` for the tokens of the data."""
        config: RetroPreprocessingConfig = self.config
        flags: dict[str, Any] = {
            name.removeprefix("retro_gpt_"): str(self.directory / self.settings[name])
            for name in _tokenizer_files(config)
            if name.startswith("retro_gpt_")
        }
        flags["tokenizer_type"] = config.retro_gpt_tokenizer_type
        flags["vocab_size"] = config.retro_gpt_vocab_size
        return tokenizer_arguments(TokenizerConfig(**flags))

    @property
    def bert_vocab_file(self) -> str | None:
        """Path of the vocabulary of BERT, if it is given."""
        name = self.settings.get("retro_bert_vocab_file")
        return str(self.directory / name) if name else None

    def digest(self, **further: Any) -> str:
        """Return a hash of the settings and of `further` ones."""
        text = json.dumps({**self.settings, **further}, sort_keys=True)
        return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()

    def write_neighbor_directories(self, names: Mapping[str, str]) -> None:
        """Write where the neighbors of train, valid and test are, for training.

        Raises:
            DataError: the file cannot be written.
        """
        _write(self.directory / "config.json", {**self.settings, _NEIGHBORS: dict(names)})


def saved_settings(directory: Path) -> dict[str, Any]:
    """Return the content of the project's config.json; empty if there is none.

    Raises:
        ConfigError: it is not a JSON object.
    """
    file = directory / "config.json"
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--retro-project-dir {directory}: cannot read {file}: {error}"
        ) from error
    if not isinstance(settings, dict):
        raise ConfigError(f"--retro-project-dir {directory}: {file} is not a JSON object")
    return settings


def read_retro_flags(
    argv: Sequence[str], *, description: str | None, extra: Mapping[str, type] | None = None
) -> Parsed:
    """Parse the flags of a tool for Retro projects: the section "retro", and `extra` ones.

    Settings default to the project's earlier commands.

    Raises:
        ConfigError: a flag is unknown, refused, missing or malformed.
    """
    given = peek(argv)
    directory = given.get("retro_project_dir") or given.get("retro_workdir")
    saved = saved_settings(Path(directory)) if directory else {}
    return parse_sections(
        argv,
        {"retro": RetroPreprocessingConfig, **(extra or {})},
        description=description or "",
        legacy=RETRO_LEGACY,
        defaults={name: value for name, value in saved.items() if name in KEPT},
    )


def prepare_project(config: RetroPreprocessingConfig, ranks: Ranks) -> Project:
    """Return the project of `config`; the first rank makes its directory if it is new.

    Settings are final once there is a database.

    Raises:
        ConfigError: settings contradict earlier commands, or files do not exist.
        DataError: token files are damaged or have changed, or a file cannot be written.

    Communication: waits for the first rank, through files.
    """
    directory = Path(config.retro_project_dir)
    file = directory / "config.json"
    kept = _kept_settings(config, directory)
    saved = saved_settings(directory) if (directory / "db").exists() else {}
    raise_if_any(contradictions_with(kept, saved, file))
    if ranks.is_first:
        if not saved:
            _make(config, directory)
        settings = {**saved, **kept}
        project = Project(directory, config, settings)
        raise_if_any(tokenizer_problems(**project.tokenizer_arguments))
        settings[_DIGESTS] = _checked_digests(project, saved, file)
        if settings != saved:
            _write(file, settings)

    def is_written() -> bool:
        found = saved_settings(directory)
        return _DIGESTS in found and not any(contradictions_with(kept, found, file))

    ranks.wait(lambda: "" if is_written() else str(file))
    settings = saved_settings(directory)
    settings.pop(_NEIGHBORS, None)
    return Project(directory, config, settings)


def _kept_settings(config: RetroPreprocessingConfig, directory: Path) -> dict[str, Any]:
    """Return the settings that config.json keeps, with paths from the project's folders on."""
    kept = {name: value for name in KEPT if (value := getattr(config, name)) is not None}
    for name, file in _tokenizer_files(config).items():
        kept[name] = _inside(Path(file), directory, Path("tokenizer"))
    if config.bert_load is not None:
        kept["bert_load"] = os.path.abspath(config.bert_load)
    words = list(config.retro_gpt_data_path or [])
    _require_blend(words)
    paths = range(1, len(words), 2) if len(words) > 1 else range(1)
    for i in paths:
        words[i] = _name_of(words[i], directory)
    kept["retro_gpt_data_path"] = words
    return kept


def _tokenizer_files(config: RetroPreprocessingConfig) -> dict[str, str]:
    """Return the files of tokenizers that are given, by the fields of their flags."""
    files = {
        "retro_gpt_tokenizer_model": config.retro_gpt_tokenizer_model,
        "retro_gpt_vocab_file": config.retro_gpt_vocab_file,
        "retro_gpt_merge_file": config.retro_gpt_merge_file,
        "retro_bert_vocab_file": config.retro_bert_vocab_file,
    }
    return {name: file for name, file in files.items() if file is not None}


def _require_blend(words: Sequence[str]) -> None:
    flag = f"--retro-gpt-data-path {' '.join(words)}"
    if len(words) > 1 and len(words) % 2:
        raise ConfigError(f"{flag}: give one prefix, or alternating weights and prefixes")
    weights = [finite_or_none(word) for word in words[::2]] if len(words) > 1 else [1.0]
    if any(weight is None or weight < 0 for weight in weights) or not any(weights):
        raise ConfigError(f"{flag}: weights are numbers, 0 or more, and one is above 0")


def _parts(words: Sequence[str]) -> list[tuple[str, float]]:
    """Return name and weight of each of the token files; of equal names the weights are added."""
    if len(words) == 1:
        return [(words[0], 1.0)]
    weights: dict[str, float] = {}
    for weight, name in zip(words[::2], words[1::2], strict=True):
        weights[name] = weights.get(name, 0.0) + float(weight)
    return [*weights.items()]


def _inside(path: Path, directory: Path, folder: Path) -> str:
    """Return `path` from the project directory on: where it is, or where a copy of it goes."""
    if not path.is_absolute() and (directory / path).exists():
        return str(path)
    if path.resolve().is_relative_to(directory.resolve()):
        return str(path.resolve().relative_to(directory.resolve()))
    return str(folder / path.name)


def _name_of(prefix: str, directory: Path) -> str:
    """Return the name of token files in data/: as given if it exists, or their link's name."""
    data = directory / "data"
    if not Path(prefix).is_absolute() and (data / f"{prefix}.idx").exists():
        return prefix
    return _inside(Path(prefix), data, Path())


def _make(config: RetroPreprocessingConfig, directory: Path) -> None:
    """Put links to the token files, and copies of the tokenizer's files, into the project."""
    words = config.retro_gpt_data_path or []
    with write_errors_name(directory):
        for folder in ("data", config.retro_gpt_data_cache_path):
            if folder is not None:
                (directory / folder).mkdir(parents=True, exist_ok=True)
    for prefix in words[1::2] if len(words) > 1 else words:
        link = str(directory / "data" / _name_of(prefix, directory))
        for target, linked in zip(_files_of(prefix), _files_of(link), strict=True):
            is_needed = target.suffix in (".bin", ".idx")
            if is_needed or target.exists():
                _link(linked, target, f"--retro-gpt-data-path {prefix}")
    for name, source in _tokenizer_files(config).items():
        flag = f"--{name.replace('_', '-')} {source}"
        target = directory / _inside(Path(source), directory, Path("tokenizer"))
        if not target.exists():
            _copy(Path(source), target, flag)
        elif Path(source).is_file() and not filecmp.cmp(source, target, shallow=False):
            raise ConfigError(f"{flag}: {target} is another file: give another --retro-project-dir")


def _files_of(prefix: str) -> tuple[Path, ...]:
    """Return the paths of token files, and of files that may be next to them."""
    pair = pair_of(prefix)
    return (*pair, record_path(prefix), digests_path(pair[0]))


def _link(link: Path, target: Path, flag: str) -> None:
    if link.exists() and (not target.exists() or link.samefile(target)):
        return
    if not target.exists():
        raise ConfigError(f"{flag}: there is no file {target}")
    if link.exists():
        raise ConfigError(f"{flag}: {link} is another file: give token files different names")
    with write_errors_name(link):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)  # to files that have gone
        link.symlink_to(os.path.abspath(target))


def _copy(source: Path, target: Path, flag: str) -> None:
    if not source.exists():
        raise ConfigError(f"{flag}: there is no such file")
    with write_errors_name(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            staging = target.with_name(f"{target.name}.copying")
            shutil.rmtree(staging, ignore_errors=True)  # of a command that was killed
            shutil.copytree(source, staging)
            os.rename(staging, target)
        else:
            with replacing(target) as temporary:
                shutil.copyfile(source, temporary)


def _checked_digests(project: Project, saved: Mapping[str, Any], file: Path) -> dict[str, str]:
    """Return the digests of the indices of the token files.

    Raises:
        DataError: they differ from the first command's.
    """
    found = {
        name: dataset.index_digest
        for name, dataset in zip(project.names, project.datasets, strict=True)
    }
    changed = [
        name for name, digest in saved.get(_DIGESTS, {}).items() if found.get(name) != digest
    ]
    if changed:
        raise DataError(
            f"{project.directory / 'data' / changed[0]}.idx has changed since the project was begun "
            f"({file}): chunks and neighbors belong to the older token files; begin another "
            "--retro-project-dir"
        )
    return found


def _write(file: Path, settings: Mapping[str, Any]) -> None:
    with write_errors_name(file):
        replace_text(file, json.dumps(settings, indent=2) + "\n", is_flushed=True)
