"""Patches for checkpoint files: which are found, read and copied."""

import glob
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.pipe import PipelineModule
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.state_dict_factory import SDLoaderBase

log = logging.getLogger(__name__)


@contextmanager
def one_read_per_file() -> Iterator[None]:
    """Read each file of a checkpoint once inside the `with` block (`check_ckpt_list`).

    DeepSpeed has every rank read the first file of each list as well, to compare one number in it
    with the length of the list. Our manifest lists all files.
    """
    usual = SDLoaderBase.check_ckpt_list
    SDLoaderBase.check_ckpt_list = _require_files
    try:
        yield
    finally:
        SDLoaderBase.check_ckpt_list = usual


def _require_files(loader: SDLoaderBase) -> None:
    assert loader.ckpt_list, "no file for this part of the network"


@contextmanager
def literal_paths() -> Iterator[None]:
    """Find checkpoint files in folders of any name inside the `with` block.

    DeepSpeed takes the full path for a glob pattern, in which brackets and stars are no letters
    (`_get_all_ckpt_names`, `ckpt_layer_path_list`).
    """
    finders = (DeepSpeedEngine, "_get_all_ckpt_names"), (PipelineModule, "ckpt_layer_path_list")
    usual = [getattr(owner, name) for owner, name in finders]
    for (owner, name), find in zip(finders, usual, strict=True):
        setattr(owner, name, _escaped(find))
    try:
        yield
    finally:
        for (owner, name), find in zip(finders, usual, strict=True):
            setattr(owner, name, find)


def _escaped(find: Callable[..., list[str]]) -> Callable[..., list[str]]:
    def find_in(holder: Any, directory: str, *args: Any) -> list[str]:
        return find(holder, glob.escape(directory), *args)

    return find_in


def log_failed_script_copies(engine: Any) -> None:
    """Warn where `zero_to_fp32.py` cannot be copied beside a checkpoint (`_copy_recovery_script`).

    Only rank 0 copies it, while the other ranks wait: a full disk must not end that rank alone.
    """
    copy = engine._copy_recovery_script

    def copy_or_log(directory: str) -> None:
        try:
            copy(directory)
        except OSError as error:
            log.warning("%s: DeepSpeed's zero_to_fp32.py cannot be put there: %s", directory, error)

    engine._copy_recovery_script = copy_or_log
