"""Retro project directory: the settings in its config.json, which training has to agree with."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.common.errors import ConfigError

_FIELDS = {
    "retro_gpt_seed": "seed",
    "retro_gpt_data_path": "data_path",
    "retro_gpt_data_cache_path": "data_cache_path",
    "retro_gpt_split": "split",
    "retro_gpt_train_samples": "train_samples",
    "retro_gpt_eval_interval": "eval_interval",
    "retro_gpt_eval_iters": "eval_iters",
    "retro_gpt_tokenizer_type": "tokenizer_type",
    "retro_gpt_tokenizer_model": "tokenizer_model",
    "retro_gpt_vocab_file": "vocab_file",
    "retro_gpt_merge_file": "merge_file",
    "retro_gpt_vocab_size": "vocab_size",
    "retro_gpt_sample_order": "sample_order",
    "retro_gpt_seq_length": "seq_length",
    "retro_gpt_global_batch_size": "global_batch_size",
    "retro_gpt_chunk_length": "retro_chunk_length",
}
"""Fields of flags by the keys of config.json that they have to agree with."""

_FOLDERS = {
    "retro_gpt_tokenizer_model": "",
    "retro_gpt_vocab_file": "",
    "retro_gpt_merge_file": "",
    "retro_gpt_data_cache_path": "",
    "retro_gpt_data_path": "data",
}
"""Folder of the project that the paths of a key are relative to."""


@dataclass(frozen=True, kw_only=True)
class RetroPlan:
    """Retrieved neighbors of samples, resolved."""

    project_dir: str = ""  # "": nothing is retrieved
    chunk_length: int = 0  # tokens
    num_chunks: int = 0  # of a sample
    num_neighbors: int = 0  # of a chunk
    num_retrieved_chunks: int = 0  # of a neighbor: itself and the following chunks of its document
    verifies_count: bool = True  # that there are neighbors for all samples of the run


@dataclass(frozen=True)
class RetroProject:
    """Retro project directory with the settings that its neighbors were queried with.

    Args:
        settings: the content of config.json.
    """

    directory: Path
    settings: Mapping[str, Any]

    @property
    def file(self) -> Path:
        """The file of settings."""
        return self.directory / "config.json"

    @property
    def defaults(self) -> dict[str, Any]:
        """Values of flags that training takes from preprocessing, by the names of their fields."""
        return {field: self._value(key) for key, field in _FIELDS.items() if self._has(key)}

    def contradictions(self, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield the flags whose value is not the one that neighbors were queried with.

        Args:
            values: of all flags, by the names of their fields. --data-path may differ, as token
                files may have moved.
        """
        for key, field in _FIELDS.items():
            if field == "data_path" or not self._has(key):
                continue
            flag = f"--{field.replace('_', '-')}"
            if values[field] != self._value(key):
                yield (
                    f"{flag} {values[field]} contradicts {key} {self.settings[key]} in {self.file}: "
                    "neighbors belong to the samples that preprocessing saw, so leave the flag out"
                )
        for field in ("train_iters", "train_tokens"):
            if self._has("retro_gpt_train_samples") and values[field] is not None:
                yield (
                    f"--{field.replace('_', '-')} {values[field]} contradicts retro_gpt_train_samples "
                    f"in {self.file}, which is the length of the run: leave the flag out, or end a run "
                    "earlier with --exit-interval"
                )

    def neighbor_directory(self, role: str) -> Path:
        """Return the folder with the neighbors of the samples of `role`: train, valid or test.

        Raises:
            ConfigError: there is none.
        """
        names = self.settings.get("retro_neighbor_dirs") or {}
        name = names.get(role) if isinstance(names, Mapping) else None
        if not name:
            raise ConfigError(
                f"{self.file}: retro_neighbor_dirs names no folder for {role}: query the neighbors of "
                "these samples first"
            )
        folder = self.directory / "query" / name
        if not folder.is_dir():
            raise ConfigError(
                f"{self.file}: retro_neighbor_dirs names {folder} for {role}, and there is no such "
                "directory"
            )
        return folder

    def _has(self, key: str) -> bool:
        return self.settings.get(key) is not None

    def _value(self, key: str) -> Any:
        """Return the value of a key as a flag has it: paths from the project's folders on."""
        value = self.settings[key]
        if key not in _FOLDERS:
            return value
        folder = self.directory / _FOLDERS[key]
        if key != "retro_gpt_data_path":
            return str(folder / value)
        words = value.split() if isinstance(value, str) else [str(word) for word in value]
        if len(words) == 1:
            return [str(folder / words[0])]
        return [str(folder / word) if number % 2 else word for number, word in enumerate(words)]


def read_retro_project(directory: str) -> RetroProject:
    """Read the settings of a Retro project directory (--retro-project-dir).

    Raises:
        ConfigError: there is no config.json, or it is not a JSON object.
    """
    file = Path(directory) / "config.json"
    flag = f"--retro-project-dir {directory}"
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{flag}: cannot read {file}, which preprocessing writes: {error.strerror}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{flag}: {file} is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{flag}: {file} holds {settings!r} instead of a JSON object")
    return RetroProject(Path(directory), settings)
