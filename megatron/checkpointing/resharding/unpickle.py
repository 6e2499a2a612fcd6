"""Load torch files and metadata of distributed checkpoints without running code from them."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, IntEnum
from io import BytesIO
from pathlib import Path
from pickle import Unpickler, UnpicklingError
from pkgutil import resolve_name
from typing import Any
from zipfile import ZIP_STORED, ZipFile, is_zipfile

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from megatron.common.errors import CheckpointError


class Record:
    """Attributes of an object, in place of its class."""


class FragmentAddress(Record):
    """Offset and length of a weight in the flat tensor of a rank."""

    numel: int
    start: int


class ZeroStage(IntEnum):
    """ZeRO stage, as DeepSpeed saves it: by value, or by its name of a member."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class LossScaler(Record):
    """Static loss scale."""


class DynamicLossScaler(Record):
    """Dynamic loss scale."""


class Opaque:
    """Stand-in for an object of another program; its class is not imported.

    Args:
        parts: constructor arguments in the file, such as the value of an enumeration.
    """

    def __init__(self, *parts: Any):
        self.parts = parts

    def __setstate__(self, state: Any) -> None:
        """Keep named attributes, or the items of a tuple as `parts`."""
        if isinstance(state, dict):
            vars(self).update(state)
        elif isinstance(state, tuple):
            self.parts = state


def _member(owner: Any, name: str) -> Any:
    """Return a member of an enumeration, in place of `getattr`.

    Early versions of Python 3.11 pickle members as `getattr(class, name)`; any other use is refused.
    """
    if owner is Opaque:
        return Opaque(name)
    if isinstance(owner, type) and issubclass(owner, Enum) and name in owner.__members__:
        return owner[name]
    raise UnpicklingError("GLOBAL getattr")


_UNSUPPORTED_GLOBAL = re.compile(r"GLOBAL (\S+)")
_MACHINE_ERROR = re.compile(r"allocate|out of memory|CUDA")

Allowed = list[Callable[..., Any] | tuple[Callable[..., Any], str]]

_STAND_INS: Allowed = [
    (FragmentAddress, "deepspeed.utils.tensor_fragment.fragment_address"),
    (ZeroStage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (LossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (DynamicLossScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
]
"""Classes allowed besides torch's, and their names in files."""

_MEMBER: Allowed = [(_member, "builtins.getattr")]

_FOREIGN_PACKAGES = (
    "apex",
    "argparse",
    "codecarbon",
    "deepspeed",
    "fp16",
    "lightning",
    "lightning_fabric",
    "megatron",
    "nemo",
    "numpy",
    "omegaconf",
    "pathlib",
    "pytorch_lightning",
)
"""Packages whose objects checkpoints of other programs contain."""

_TYPES_OF_FIELDS = (
    *("builtins.bool", "builtins.dict", "builtins.float", "builtins.int", "builtins.list"),
    *("builtins.str", "collections.defaultdict", "typing.Any"),
)
"""Types that configurations of omegaconf's name."""

_LEGACY_GLOBALS = (
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
"""Objects allowed in files of torch before 1.6, which do not list their globals."""

_RECORD_PACKAGES = ("torch.distributed.checkpoint.", "pathlib")
_RECORD_PARTS = (("torch.serialization", "_get_layout"), ("builtins", "getattr"))
"""Classes in a distributed checkpoint's metadata besides sizes and dtypes."""


def read_tensors(file: Path) -> Any:
    """Load `file` with memory-mapped tensors.

    Raises:
        CheckpointError: it is missing, damaged, or holds objects of other classes.
    """
    return _read_mapped(file, _STAND_INS)


def read_state(file: Path, device: Any = None) -> Any:
    """Load `file` into memory with DeepSpeed's classes, for its engine.

    Args:
        device: map_location of torch.load.

    Raises:
        CheckpointError: it is missing, damaged, or holds objects of other classes.
    """
    known: Allowed = [resolve_name(name) for _, name in _STAND_INS]  # type: ignore[misc]
    return _read(file, known, map_location=device)


def read_foreign(file: Path) -> Any:
    """Load a `file` of another program with memory-mapped tensors.

    Objects of that program become Opaque: none of its code is imported or run.

    Raises:
        CheckpointError: the file is missing, damaged, or has objects of other packages.
    """
    with _checkpoint_errors(file):
        names = get_unsafe_globals_in_checkpoint(file) if _is_zip(file) else _LEGACY_GLOBALS
    return _read_mapped(file, _with_stand_ins(names))


def read_foreign_bytes(content: bytes, where: str) -> Any:
    """Load a part of another program's file, saved by torch, as `read_foreign` does.

    Args:
        where: names the part in messages.

    Raises:
        CheckpointError: it is damaged, or has objects of other packages.
    """
    with _checkpoint_errors(where):
        allowed = _with_stand_ins(get_unsafe_globals_in_checkpoint(BytesIO(content)))
        with safe_globals([*allowed, *_MEMBER]):
            return torch.load(BytesIO(content), weights_only=True, map_location="cpu")


def read_records(file: Path) -> Any:
    """Load the metadata of a distributed checkpoint of torch: records become Opaque, sizes tuples.

    Raises:
        CheckpointError: the file is missing, damaged, or has other objects.
    """
    with _checkpoint_errors(file), file.open("rb") as content:
        return _RecordUnpickler(content).load()


class _RecordUnpickler(Unpickler):
    """Unpickler of inert records: it imports nothing and has no function to call."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for a class of the format; refuse all other classes."""
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module.startswith(_RECORD_PACKAGES) or (module, name) in _RECORD_PARTS:
            return Opaque
        raise UnpicklingError(f"GLOBAL {module}.{name}")


def _with_stand_ins(names: Iterable[str]) -> Allowed:
    """Return the classes allowed in another program's file that refers to `names`."""
    known = {name for _, name in _STAND_INS}  # type: ignore[misc]
    others: Allowed = [
        (Opaque, name)
        for name in names
        if name.split(".")[0] in _FOREIGN_PACKAGES and name not in known or name in _TYPES_OF_FIELDS
    ]
    return [*_STAND_INS, *others]


def _read_mapped(file: Path, allowed: Allowed) -> Any:
    with _checkpoint_errors(file):
        # Files of torch before 1.6 cannot be mapped.
        mapped = not file.exists() or _is_zip(file)
    return _read(file, allowed, map_location="cpu", mmap=mapped)


def _is_zip(file: Path) -> bool:
    """Return whether `file` is an archive whose members can be mapped; False: none at all.

    Raises:
        CheckpointError: members are compressed: their bytes would be taken for weights.
    """
    if not is_zipfile(file):
        return False
    with ZipFile(file) as archive:
        if any(member.compress_type != ZIP_STORED for member in archive.infolist()):
            raise CheckpointError(
                f"{file} is compressed, as torch never writes files: another program has packed it; "
                "unpack it and pack it without compression (zip -0), or save it with torch again"
            )
    return True


def _read(file: Path, allowed: Allowed, **how: Any) -> Any:
    with _checkpoint_errors(file), safe_globals([*allowed, *_MEMBER]):
        return torch.load(file, weights_only=True, **how)


@contextmanager
def _checkpoint_errors(file: object) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        # torch's reader raises errors of any kind on other bytes.
        raise CheckpointError(f"{file} cannot be read: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Describe a load error without torch's advice to load the file unsafely."""
    text = str(error)
    if isinstance(error, OSError):
        return error.strerror or text
    if unsupported := _UNSUPPORTED_GLOBAL.search(text):
        return f"it refers to {unsupported.group(1)}, which no checkpoint needs; none of its code was run"
    if _MACHINE_ERROR.search(text):
        return text.partition("\n")[0]
    return "it was not saved by torch, or it is damaged or truncated"
