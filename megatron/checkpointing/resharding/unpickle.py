"""Reading what torch saved without running anything that a file asks for."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from zipfile import is_zipfile

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from megatron.common.errors import CheckpointError


class Record:
    """The attributes of an object whose own class is not needed to read it."""


class FragmentAddress(Record):
    """Where a weight begins in the flat tensor of a rank, and how many of its elements lie there."""

    numel: int
    start: int


class ZeroStage(IntEnum):
    """The stage of ZeRO, as DeepSpeed writes it."""

    DISABLED = 0
    OPTIMIZER_STATES = 1
    GRADIENTS = 2
    WEIGHTS = 3


class LossScaler(Record):
    """A loss scale that stays."""


class DynamicLossScaler(Record):
    """A loss scale that follows overflows."""


class Opaque:
    """An object of another program: what it was made of, without its class and what that does.

    Args:
        parts: what the file says that it is made from, such as the value of an enumeration.
    """

    def __init__(self, *parts: Any):
        self.parts = parts

    def __setstate__(self, state: Any) -> None:
        """Keep attributes that have names."""
        if isinstance(state, dict):
            vars(self).update(state)


_ASKED_FOR = re.compile(r"GLOBAL (\S+)")
_OF_THE_MACHINE = re.compile(r"allocate|out of memory|CUDA")

Allowed = list[Callable[..., Any] | tuple[Callable[..., Any], str]]

_STAND_INS: Allowed = [
    (FragmentAddress, "deepspeed.utils.tensor_fragment.fragment_address"),
    (ZeroStage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (LossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (DynamicLossScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
]
"""The only classes beside torch's own that are read, and the names that files know them by."""

_OF_OTHERS = ("apex", "argparse", "codecarbon", "deepspeed", "fp16", "megatron", "numpy", "pathlib")
"""Packages whose objects lie beside the tensors in checkpoints of other programs."""

_OF_OLD_FILES = (
    "argparse.Namespace",
    "fp16.loss_scaler.DynamicLossScaler",
    "fp16.loss_scaler.LossScaler",
    "megatron.fp16.loss_scaler.DynamicLossScaler",
    "megatron.fp16.loss_scaler.LossScaler",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.dtype",
    "numpy.ndarray",
)
"""The objects in files of torch before 1.6, which do not say beforehand what they hold."""


def read_tensors(file: Path) -> Any:
    """Return what `file` holds; its tensors stay on disk until they are looked at.

    Raises:
        CheckpointError: it is missing, damaged, or holds objects of other classes.
    """
    return _read_mapped(file, _STAND_INS)


def read_state(file: Path, device: Any = None) -> Any:
    """Return what `file` holds as DeepSpeed wants it: in memory, with objects of its own classes.

    Args:
        device: where tensors go, as torch.load takes it.

    Raises:
        CheckpointError: it is missing, damaged, or holds objects of other classes.
    """
    known: Allowed = [resolve_name(name) for _, name in _STAND_INS]  # type: ignore[misc]
    return _read(file, known, map_location=device)


def read_foreign(file: Path) -> Any:
    """Return what another program's `file` holds; see read_tensors.

    Objects of that program become Opaque: none of its code is imported, and none is run.

    Raises:
        CheckpointError: it is missing, damaged, or holds objects of packages that no checkpoint
            needs.
    """
    known = {name for _, name in _STAND_INS}  # type: ignore[misc]
    with _told_as_ours(file):
        names = get_unsafe_globals_in_checkpoint(file) if is_zipfile(file) else _OF_OLD_FILES
    others: Allowed = [
        (Opaque, name) for name in names if name.split(".")[0] in _OF_OTHERS and name not in known
    ]
    return _read_mapped(file, [*_STAND_INS, *others])


def _read_mapped(file: Path, allowed: Allowed) -> Any:
    # Files of torch before 1.6 cannot be mapped.
    mapped = not file.exists() or is_zipfile(file)
    return _read(file, allowed, map_location="cpu", mmap=mapped)


def _read(file: Path, allowed: Allowed, **how: Any) -> Any:
    with _told_as_ours(file), safe_globals(allowed):
        return torch.load(file, weights_only=True, **how)


@contextmanager
def _told_as_ours(file: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # Bytes of anything else lead torch's reader into errors of every kind.
        raise CheckpointError(f"{file} cannot be read: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return what is wrong; torch's own words also tell how to read it all the same."""
    text = str(error)
    if isinstance(error, OSError):
        return error.strerror or text
    if asked := _ASKED_FOR.search(text):
        return f"it asks for {asked.group(1)}, which no checkpoint needs; nothing of it was run"
    if _OF_THE_MACHINE.search(text):
        return text.partition("\n")[0]
    return "it is no file that torch saved, or it is damaged or cut short"
