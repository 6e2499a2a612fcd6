"""Reading what torch saved without running anything that a file asks for."""

from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from megatron.errors import CheckpointError


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
    return _read(file, _STAND_INS)


def read_foreign(file: Path) -> Any:
    """Return what another program's `file` holds; see read_tensors.

    Objects of that program become Opaque: none of its code is imported, and none is run.

    Raises:
        CheckpointError: it is missing, damaged, or holds objects of packages that no checkpoint
            needs.
    """
    known = {name for _, name in _STAND_INS}  # type: ignore[misc]
    try:
        names = get_unsafe_globals_in_checkpoint(file) if is_zipfile(file) else _OF_OLD_FILES
    except (OSError, EOFError, RuntimeError, ValueError, UnpicklingError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    others: Allowed = [
        (Opaque, name) for name in names if name.split(".")[0] in _OF_OTHERS and name not in known
    ]
    return _read(file, [*_STAND_INS, *others])


def _read(file: Path, allowed: Allowed) -> Any:
    try:
        with safe_globals(allowed):
            # Files of torch before 1.6 cannot be mapped.
            mapped = not file.exists() or is_zipfile(file)
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except (OSError, EOFError, RuntimeError, UnpicklingError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
