"""DeepSpeed's door to the files of a checkpoint: what it saves and loads goes through here."""

import glob
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.state_dict_factory import SDLoaderBase

log = logging.getLogger(__name__)

Write = Callable[[Any, Path], None]
"""Writes a state to a file as torch.save does, at once or later; see checkpoint/writer.py."""


def save_plainly(state: Any, file: Path) -> None:
    """Write `state` to `file` at once, without a hash."""
    torch.save(state, file)


Read = Callable[[Path, Any], Any]
"""Returns what a file holds, its tensors where torch.load's `map_location` says; runs nothing that
the file asks for. See checkpoint/unpickle.py."""


class StateFiles(CheckpointEngine):
    """Writes with what `write` is at the moment, and reads with what `read` is."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "StateFiles"
        self.write: Write = save_plainly
        self.read: Read | None = None

    def create(self, info: CheckpointCommitInfo) -> None:
        """Do nothing: the folder is there."""

    def save(self, state_dict: Any, path: str) -> None:
        """Write `state_dict`, or have it written."""
        self.write(state_dict, Path(path))

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return what a file holds."""
        assert self.read
        return self.read(Path(path), map_location)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Do nothing: a checkpoint counts when it is published."""
        return True


@contextmanager
def opened_once() -> Iterator[None]:
    """Let DeepSpeed read each file of a checkpoint once inside the `with` block.

    By itself every rank reads, of each list of files, all of the first one, to compare one number
    in it with the length of the list, and then its own. Our manifest names all files.
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
def taken_literally() -> Iterator[None]:
    """Let DeepSpeed find files in folders of any name inside the `with` block.

    By itself it takes the whole path for a pattern, in which brackets and stars are no letters.
    """
    finders = (DeepSpeedEngine, "_get_all_ckpt_names"), (PipelineModule, "ckpt_layer_path_list")
    usual = [getattr(owner, name) for owner, name in finders]
    for (owner, name), find in zip(finders, usual, strict=True):
        setattr(owner, name, _of_literal(find))
    try:
        yield
    finally:
        for (owner, name), find in zip(finders, usual, strict=True):
            setattr(owner, name, find)


def _of_literal(find: Callable[..., list[str]]) -> Callable[..., list[str]]:
    def find_in(holder: Any, directory: str, *words: Any) -> list[str]:
        return find(holder, glob.escape(directory), *words)

    return find_in


def without_disk_errors(copy_script: Callable[[str], None]) -> Callable[[str], None]:
    """Return what copies DeepSpeed's script for other programs, or says that it cannot.

    Only rank 0 copies it, while the others wait: a full disk must not end that one alone.
    """

    def copy_or_tell(directory: str) -> None:
        try:
            copy_script(directory)
        except OSError as error:
            log.warning("%s: DeepSpeed's zero_to_fp32.py cannot be put there: %s", directory, error)

    return copy_or_tell
