"""Published data sets: files, text key, licence and revision of Hugging Face data set folders and shards."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import orjson

from megatron.common.errors import ConfigError
from megatron.common.remote_files import is_url, size_of_input
from megatron.data.readers.inputs import STDIN, columns_of_tables, find_sources, read_blocks
from megatron.data.readers.line_blocks import Limits

TEXT_KEYS = ("text", "content", "raw_content")
"""Keys of the text in published data sets, the most common first."""

_REVISION = re.compile("[0-9a-f]{40}")
_LONGEST_LINE = 1 << 26


@dataclass(frozen=True)
class Published:
    """The files of one split of a data set, and the description in its card."""

    files: tuple[str, ...]
    source: dict[str, Any]


def find_published(
    inputs: Sequence[str],
    *,
    config_name: str | None,
    split: str,
    licence: str | None,
    date: str | None,
) -> Published:
    """Return the files of a data set.

    Args:
        inputs: one folder, which `datasets`' save_to_disk wrote or which is a data set of the
            Hugging Face hub; or files and globs.
        licence: of the text, where it differs from the card's.
        date: of the source, where it differs from the newest file's.

    Raises:
        ConfigError: the folder has no such split or configuration, or `datasets` is not installed.
        DataError: a file is missing.
    """
    if STDIN in inputs:
        raise ConfigError(f"--input {STDIN}: a published data set is read from files")
    folder = Path(inputs[0])
    about: dict[str, Any] = {"input": list(inputs)}
    if len(inputs) > 1 or not folder.is_dir():
        if config_name:
            raise ConfigError(f"--config-name {config_name}: --input names no folder, but files")
        paths = [source.path for source in find_sources(inputs)]
    elif any((folder / name).exists() for name in ("dataset_dict.json", "state.json")):
        paths = _saved_files(folder, split)
        about |= {"split": split, "licence": _licence_of_saved(Path(paths[0]).parent)}
    else:
        paths = _hub_files(folder, config_name, split)
        about |= {"config": config_name, "split": split, "licence": _licence_of_card(folder)}
        about["revision"] = _revision(folder)
    about |= {"files": len(paths), "bytes": sum(map(size_of_input, paths))}
    about["date"] = date or _date_of_newest(paths)
    about["licence"] = licence or about.get("licence")
    return Published(tuple(paths), about)


def training_files(inputs: Sequence[str]) -> list[str]:
    """Return `inputs`, and in place of a single folder the files of its training split.

    Raises:
        ConfigError: see `find_published`.
    """
    if len(inputs) != 1 or not Path(inputs[0]).is_dir():
        return [*inputs]
    options = {"config_name": None, "licence": None, "date": None}
    return [*find_published(inputs, split="train", **options).files]


def text_key(path: str) -> str:
    """Return the key or column of the text in a file, by its first document.

    Raises:
        ConfigError: it has none of the usual names.
        DataError: the file cannot be read.
    """
    names = _keys(path)
    for key in TEXT_KEYS:
        if key in names:
            return key
    raise ConfigError(
        f"{path} has no {', '.join(TEXT_KEYS)}, but {', '.join(names) or 'nothing'}: give --json-keys"
    )


def _keys(path: str) -> list[str]:
    sources = find_sources([path])
    for _, names in columns_of_tables(sources):
        return names
    for block in read_blocks(sources, Limits(1, _LONGEST_LINE, 1)):
        try:
            document = orjson.loads(block.data or b"")
        except ValueError:
            continue
        if isinstance(document, dict):
            return list(document)
    return []


def _saved_files(folder: Path, split: str) -> list[str]:
    """Return the files of a data set that save_to_disk wrote, or of a split of it."""
    if (folder / "dataset_dict.json").exists():
        splits = _read_json(folder / "dataset_dict.json").get("splits", [])
        if split not in splits:
            raise ConfigError(
                f"--split-name {split}: {folder} has no such split, but {', '.join(splits)}"
            )
        folder /= split
    entries = _read_json(folder / "state.json").get("_data_files")
    if not entries:
        raise ConfigError(f"--input {folder} has no data: {folder / 'state.json'} names no file")
    return [str(folder / entry["filename"]) for entry in entries]


def _licence_of_saved(folder: Path) -> str | None:
    info = folder / "dataset_info.json"
    return (_read_json(info).get("license") or None) if info.exists() else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is damaged or missing ({error})") from error


def _hub_files(folder: Path, config_name: str | None, split: str) -> list[str]:
    """Return the files that a card, or their names, give to a split."""
    try:
        from datasets import (
            get_dataset_config_names,
            get_dataset_default_config_name,
            load_dataset_builder,
        )
    except ImportError as error:
        raise ConfigError(
            f"--input {folder} is a folder, whose files `datasets` finds: pip install datasets, or "
            f"give the files, as '{folder}/*.parquet'"
        ) from error
    try:
        names = get_dataset_config_names(str(folder))
        config_name = config_name or get_dataset_default_config_name(str(folder))
        if config_name not in names:
            problem = f"{config_name}: no such configuration" if config_name else "is missing"
            raise ConfigError(f"--config-name {problem}; {folder} has {', '.join(names)}")
        found = load_dataset_builder(str(folder), config_name).config.data_files or {}
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--input {folder}: {str(error).splitlines()[0]}; or give its files, as "
            f"'{folder}/FOLDER/*.parquet'"
        ) from error
    if split not in found:
        raise ConfigError(
            f"--split-name {split}: {folder} has no such split, but {', '.join(map(str, found))}"
        )
    return [str(path) for path in found[split]]


def _licence_of_card(folder: Path) -> str | None:
    from huggingface_hub import DatasetCard

    card = folder / "README.md"
    if not card.exists():
        return None
    data = DatasetCard.load(card, ignore_metadata_errors=True).data
    licences = data.license if isinstance(data.license, list) else [data.license]
    named = [getattr(data, "license_name", None) if each == "other" else each for each in licences]
    return ", ".join(str(each) for each in named if each) or None


def _revision(folder: Path) -> str | None:
    """Return the commit of a snapshot in the hub's cache, or of a folder that the hub's tools filled."""
    name = folder.resolve().name
    for metadata in sorted(folder.glob(".cache/huggingface/download/**/*.metadata"))[:1]:
        name = metadata.read_text(encoding="utf-8").partition("\n")[0].strip()
    return name if _REVISION.fullmatch(name) else None


def _date_of_newest(paths: Sequence[str]) -> str:
    if any(map(is_url, paths)):
        raise ConfigError("--date is missing: the date of files at URLs is not known")
    newest = max(os.path.getmtime(path) for path in paths)
    return datetime.fromtimestamp(newest, timezone.utc).date().isoformat()
