"""Read folders of torch.distributed.checkpoint (`.metadata`, `__R_N.distcp`), one chunk of a tensor at a time."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing.resharding.unpickle import read_foreign_bytes, read_records
from megatron.common.errors import CheckpointError, reason

METADATA = ".metadata"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Bytes of a file that torch saved: a chunk of a tensor, or an object.

    Args:
        name: of the tensor or the object.
        start: offset in the file, in bytes.
        length: in bytes.
    """

    name: str
    file: Path
    start: int
    length: int

    def read(self) -> Any:
        """Load it.

        Raises:
            CheckpointError: it cannot be read.
        """
        try:
            with self.file.open("rb") as file:
                file.seek(self.start)
                content = file.read(self.length)
        except OSError as error:
            raise CheckpointError(f"{self.file}: {reason(error, self.file)}") from error
        return read_foreign_bytes(content, f"{self.name} in {self.file}")


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A rectangular part of a tensor.

    Args:
        offset: index of its first element.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    piece: Piece


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in chunks, which are read when it is loaded; or one entry of its first dimensions.

    Args:
        shape: of the entry.
        index: of the entry in the first dimensions of the stored tensor.
        states: of the optimizer for this parameter, and its master weight as "fp32"; {} if none are
            stored.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]
    index: tuple[int, ...] = ()
    states: Mapping[str, "StoredTensor"] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.shape[0]

    def entry(self, number: int) -> "StoredTensor":
        """Return an entry of the first dimension."""
        states = {name: state.entry(number) for name, state in self.states.items()}
        return replace(self, shape=self.shape[1:], index=(*self.index, number), states=states)

    def load(self) -> Tensor:
        """Join its chunks. Memory: the tensor and one chunk.

        Raises:
            CheckpointError: a chunk is missing or damaged.
        """
        own = [chunk for chunk in self.chunks if self._has_part(chunk)]
        skipped = len(self.index)
        if sum(math.prod(chunk.shape[skipped:]) for chunk in own) != math.prod(self.shape):
            raise CheckpointError(f"{self.name}: its chunks in .metadata do not add up to a tensor")
        for chunk in own:
            if math.prod(chunk.shape) * self.dtype.itemsize > chunk.piece.length:
                raise CheckpointError(f"{self.name}: a chunk has fewer bytes than elements")
        tensor = torch.empty(self.shape, dtype=self.dtype)
        for chunk in own:
            self._fill(tensor, chunk)
        return tensor

    def _fill(self, tensor: Tensor, chunk: Chunk) -> None:
        """Read a chunk into its part of the tensor; it is freed before the next one is read."""
        found = chunk.piece.read()
        if not torch.is_tensor(found) or (found.shape, found.dtype) != (chunk.shape, self.dtype):
            raise CheckpointError(f"{chunk.piece.file}: {self.name} is not as in .metadata")
        for number, first in zip(self.index, chunk.offset, strict=False):
            found = found[number - first]
        skipped = len(self.index)
        starts = zip(chunk.offset[skipped:], chunk.shape[skipped:], strict=True)
        tensor[tuple(slice(start, start + size) for start, size in starts)] = found

    def _has_part(self, chunk: Chunk) -> bool:
        return all(
            first <= number < first + size
            for number, first, size in zip(self.index, chunk.offset, chunk.shape, strict=False)
        )


Weight = Tensor | StoredTensor
"""A tensor of a file that is open, or one that is read when it is needed."""


@dataclass(frozen=True, kw_only=True)
class StoredFolder:
    """Content of a folder of torch.distributed.checkpoint, by name."""

    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, Piece]


def read_stored(folder: Path) -> StoredFolder:
    """Read the metadata of a folder.

    Raises:
        CheckpointError: it is missing, damaged, or of another kind.
    """
    metadata = read_records(folder / METADATA)
    try:
        pieces = dict(_pieces(folder, metadata.storage_data))
        entries = metadata.state_dict_metadata.items()
        return StoredFolder(
            tensors={
                name: _tensor(name, entry, pieces) for name, entry in entries if _is_tensor(entry)
            },
            objects={
                name: pieces[name, ()]
                for name, entry in entries
                if not _is_tensor(entry) and (name, ()) in pieces
            },
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / METADATA} is not as torch.distributed.checkpoint writes it: {error!r}"
        ) from error


def _is_tensor(entry: Any) -> bool:
    return hasattr(entry, "chunks")


def _pieces(
    folder: Path, storage: Mapping[Any, Any]
) -> Iterator[tuple[tuple[str, tuple[int, ...]], Piece]]:
    """Yield where each chunk and object lies, by name and offset; () for an object."""
    for index, stored in storage.items():
        name = str(stored.relative_path)
        if Path(name).name != name:
            raise ValueError(f"{name} is no name of a file in the folder")
        if getattr(stored, "transform_descriptors", None):
            raise ValueError(f"{index.fqn} is compressed")
        yield (
            (str(index.fqn), tuple(getattr(index, "offset", None) or ())),
            Piece(
                name=index.fqn,
                file=folder / name,
                start=int(stored.offset),
                length=int(stored.length),
            ),
        )


def _tensor(
    name: str, entry: Any, pieces: Mapping[tuple[str, tuple[int, ...]], Piece]
) -> StoredTensor:
    return StoredTensor(
        name=name,
        shape=tuple(entry.size),
        dtype=entry.properties.parts[0],
        chunks=tuple(
            Chunk(
                offset=tuple(chunk.offsets),
                shape=tuple(chunk.sizes),
                piece=pieces[name, tuple(chunk.offsets)],
            )
            for chunk in entry.chunks
        ),
    )
