"""Weights in safetensors files of bounded size with an index, written and read a tensor at a time."""

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.checkpointing.resharding.unpickle import read_tensors
from megatron.common.errors import CheckpointError

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Meant:
    """A tensor that is going to be written."""

    name: str
    shape: tuple[int, ...]


class Writer:
    """Writes the tensors of `meant`, in their order, to `folder`.

    Headers say where everything lies before the first tensor is there, so nothing is held back.

    Args:
        max_bytes: size of a file's tensors; a larger tensor has a file of its own.

    Source: the format's description in the repository of safetensors.
    """

    def __init__(self, folder: Path, meant: Sequence[Meant], dtype: torch.dtype, *, max_bytes: int):
        self._dtype = dtype
        shards = _divided(meant, dtype, max_bytes)
        self.files = [_SINGLE]
        if len(shards) > 1:
            count = len(shards)
            self.files = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
            self._write_index(folder, shards)
        self._left = [
            (tensor, folder / file, _header(shard, dtype) if number == 0 else None)
            for file, shard in zip(self.files, shards, strict=True)
            for number, tensor in enumerate(shard)
        ]
        self._stream: BinaryIO | None = None

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def write(self, name: str, blocks: Iterable[Tensor]) -> None:
        """Write the next tensor, whose rows come in `blocks`.

        Raises:
            ValueError: it is another than meant, or has another number of elements.
        """
        tensor, file, header = self._left.pop(0)
        if tensor.name != name:
            raise ValueError(f"{name} comes where {tensor.name} was meant")
        if header is not None:
            self._close()
            self._stream = file.open("wb")
            self._stream.write(header)
        assert self._stream is not None
        size = 0
        for block in blocks:
            flat = block.to(self._dtype).contiguous().reshape(-1)
            self._stream.write(flat.view(torch.uint8).numpy().data)
            size += flat.numel()
        if size != math.prod(tensor.shape):
            raise ValueError(f"{name} has {size} elements instead of {math.prod(tensor.shape)}")

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
            self._stream = None

    def _write_index(self, folder: Path, shards: Sequence[Sequence[Meant]]) -> None:
        places = {
            tensor.name: file
            for file, shard in zip(self.files, shards, strict=True)
            for tensor in shard
        }
        total = sum(_size(tensor, self._dtype) for shard in shards for tensor in shard)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _size(tensor: Meant, dtype: torch.dtype) -> int:
    return math.prod(tensor.shape) * dtype.itemsize


def _divided(meant: Sequence[Meant], dtype: torch.dtype, max_bytes: int) -> list[list[Meant]]:
    shards: list[list[Meant]] = []
    filled = 0
    for tensor in meant:
        size = _size(tensor, dtype)
        if not shards or filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    return shards


def _header(shard: Sequence[Meant], dtype: torch.dtype) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in shard:
        stop = start + _size(tensor, dtype)
        entries[tensor.name] = {
            "dtype": _DTYPES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class Reader:
    """The tensors of a folder of transformers', in safetensors files or in torch's older ones.

    Raises:
        CheckpointError: there are none, or they are damaged.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._stack = ExitStack()
        self._places: dict[str, Any] = {}
        files = _files(folder)
        try:
            for file in files:
                if file.suffix == ".safetensors":
                    opened = self._stack.enter_context(safe_open(file, framework="pt"))
                    self._places.update(dict.fromkeys(opened.keys(), opened))
                else:
                    self._places.update(read_tensors(file))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder}: {error}") from error

    def __enter__(self) -> "Reader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def names(self) -> Iterator[str]:
        """The names of all tensors."""
        return iter(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, without reading it."""
        place = self._places[name]
        return tuple(place.shape if torch.is_tensor(place) else place.get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """Return a tensor."""
        place = self._places[name]
        return place if torch.is_tensor(place) else place.get_tensor(name)


def _files(folder: Path) -> list[Path]:
    """Return the files of weights in `folder`."""
    for single, index in (
        (_SINGLE, INDEX),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):
        if (folder / index).is_file():
            try:
                places = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"]
                return sorted(folder / name for name in {*places.values()})
            except (ValueError, KeyError, AttributeError) as error:
                raise CheckpointError(f"{folder / index} is damaged: {error!r}") from error
        if (folder / single).is_file():
            return [folder / single]
    raise CheckpointError(f"{folder} holds no {_SINGLE} and no pytorch_model.bin")
