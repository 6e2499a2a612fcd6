"""Preparation of a config: local copies of what its URLs name, and what files of its data decide."""

import logging
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

from megatron.checkpointing.remote import fetch, local_directory, require_published
from megatron.common.errors import ConfigError, raise_if_any
from megatron.common.remote_files import is_url, local_path, url_problems
from megatron.config.config import Config
from megatron.config.data.corpora import DataConfig
from megatron.config.data.objective import ObjectiveName
from megatron.config.data.split_paths import read_split_groups
from megatron.config.objectives import declaration_of
from megatron.config.run.checkpoint import goes_on, starts_in_place
from megatron.config.run.urls import cache_of
from megatron.data.token_files.remote_pairs import local_pair

log = logging.getLogger(__name__)

_URLS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://[^\s,]+")
_FILE = "_weighted_split_paths_path"  # end of the flags that name a file of weighted paths


def prepare(config: Config, objective: ObjectiveName, *, world_size: int) -> Config:
    """Return `config` with local copies of files at URLs, and what files of the data decide.

    Raises:
        MegatronError: a URL or a file is wrong, missing or malformed.
    """
    config = with_local_checkpoints(config)
    config = declaration_of(objective).prepare(config, world_size=world_size)
    return with_local_data(config, objective)


def local_save(config: Config) -> str:
    """Return the local directory of --save; "" for none.

    Raises:
        ConfigError: its URL holds credentials.
        WrongCheckpointError: it cannot be written to.
    """
    save = config.checkpoint.save or ""
    return local_directory(save, cache_of(config.urls), flag="--save")


def with_local_checkpoints(config: Config) -> Config:
    """Return `config` with local directories for --save and --load at URLs; download what is loaded.

    Raises:
        ConfigError: a URL holds credentials, or a package for its scheme is missing.
        WrongCheckpointError: --load holds no checkpoint, and is not --save.
        CheckpointError: it cannot be downloaded.
    """
    checkpoint, cache = config.checkpoint, cache_of(config.urls)
    changed: dict[str, Any] = {
        name: local_directory(path, cache, flag=f"--{name}")
        for name, path in (("save", checkpoint.save), ("load", checkpoint.load))
        if path and is_url(path)
    }
    if not changed:
        return config
    for name, copy in changed.items():
        log.info("--%s %s: through %s", name, getattr(checkpoint, name), copy)
    local = replace(checkpoint, **changed)
    if starts_in_place(local):
        raise ConfigError(
            "--finetune and --reset-progress with --load and --save at one URL: the checkpoints to start "
            "from cannot be moved there; save to another one"
        )
    if checkpoint.load and "load" in changed:
        directory = Path(changed["load"])
        fetch(directory, step=checkpoint.ckpt_step or 0)
        if not goes_on(local) or checkpoint.exit_on_missing_checkpoint:
            require_published(directory, checkpoint.load, flag="--load")
    return replace(config, checkpoint=local)


def with_local_data(config: Config, objective: ObjectiveName) -> Config:
    """Return `config` with local copies of token files at URLs.

    Raises:
        ConfigError: a URL holds credentials, or a package for its scheme is missing.
        DataError: token files are missing or cannot be read.
    """
    data = _with_texts_of_files(config.data)
    texts = {name: value for name in _names(data) if (value := getattr(data, name))}
    urls = {name: sorted(set(_URLS.findall(" ".join(value)))) for name, value in texts.items()}
    if not any(urls.values()):
        return config
    raise_if_any(
        problem
        for name, found in urls.items()
        for url in found
        for problem in url_problems(f"--{name.replace('_', '-')}", url)
    )
    cache = cache_of(config.urls)
    for url in sorted(set(chain(*urls.values()))):
        for suffix in declaration_of(objective).suffixes:
            local_pair(url + suffix, cache)

    def local(text: str) -> str:
        return _URLS.sub(lambda found: str(local_path(found.group(), cache)), text)

    changed: dict[str, Any] = {name: [*map(local, value)] for name, value in texts.items()}
    return replace(config, data=replace(data, **changed))


def _names(data: DataConfig) -> Iterator[str]:
    yield "data_path"
    yield from (f.name for f in fields(data) if f.name.endswith("_weighted_split_paths"))


def _with_texts_of_files(data: DataConfig) -> DataConfig:
    """Return `data` with the weighted paths of files that hold URLs in place of the files."""
    changed: dict[str, Any] = {}
    for field in fields(data):
        file = getattr(data, field.name) if field.name.endswith(_FILE) else None
        if file:
            texts = read_split_groups(file, f"--{field.name.replace('_', '-')}")
            if any(map(_URLS.search, texts)):
                changed |= {field.name: None, field.name.removesuffix("_path"): texts}
    return replace(data, **changed)
