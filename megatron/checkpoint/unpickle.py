"""Reading what torch saved without running anything that a file asks for."""

from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

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


_STAND_INS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (FragmentAddress, "deepspeed.utils.tensor_fragment.fragment_address"),
    (ZeroStage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (LossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (DynamicLossScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
]
"""The only classes beside torch's own that are read, and the names that files know them by."""


def read_tensors(file: Path) -> Any:
    """Return what `file` holds; its tensors stay on disk until they are looked at.

    Raises:
        CheckpointError: it is missing, damaged, or holds objects of other classes.
    """
    try:
        with torch.serialization.safe_globals(_STAND_INS):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, EOFError, RuntimeError, UnpicklingError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
