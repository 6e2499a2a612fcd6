"""Batch: the named tensors of a micro-batch, declared by shape; their broadcast and their slices."""

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.tensor_parallel.process_groups import Groups
from megatron.tensor_parallel.topology import Topology, zigzag_chunks

Batch = dict[str, Tensor]
"""A micro-batch: tensors by the names of their fields."""


class Field(NamedTuple):
    """Declared shape and dtype of one tensor of a batch.

    Args:
        shape: a character for each dimension: a digit is a size, a letter stands for one. b: the
            samples; s: positions, divided over the ranks that share a sample's sequence; S: as
            many positions, all of them on each of those ranks. Other letters, for instance the
            length of an encoder's input, are the objective's.
    """

    shape: str
    dtype: torch.dtype = torch.int64

    def sizes(self, letters: Mapping[str, int]) -> tuple[int, ...]:
        """Return the sizes of all dimensions, given those of the letters.

        >>> Field("bs2").sizes({"b": 4, "s": 16})
        (4, 16, 2)
        """
        return tuple(int(mark) if mark.isdigit() else letters[mark] for mark in self.shape)


Fields = Mapping[str, Field]
"""The fields of a batch, in their order."""


def pack_batch(
    batch: Batch, fields: Fields, letters: Mapping[str, int], *, pinned: bool = False
) -> Tensor:
    """Copy all fields of a batch into one tensor of bytes in host memory.

    Args:
        letters: sizes of the letters in the shapes of `fields`.
        pinned: whether its memory is page-locked, so that a copy to a GPU is asynchronous.

    Raises:
        ValueError: the batch is not the one that `fields` declare.
    """
    _require_declared(batch, fields, letters)
    packed = torch.empty(_num_bytes(fields, letters), dtype=torch.uint8, pin_memory=pinned)
    for name, view in _views(packed, fields, letters):
        view.copy_(batch[name])
    return packed


def broadcast_batch(
    packed: Tensor | None,
    fields: Fields,
    letters: Mapping[str, int],
    groups: Groups,
    device: torch.device,
) -> Batch:
    """Return tensor rank 0's batch on `device`, on every rank that shares its layers.

    Args:
        packed: the batch of tensor rank 0 on `device`, see `pack_batch`; ignored elsewhere.
        fields: what it holds.
        letters: sizes of the letters in their shapes, known to all ranks.

    Communication: one broadcast of all fields over the tensor group, packed into bytes.
    """
    if groups.tensor_rank != 0 or packed is None:
        packed = torch.empty(_num_bytes(fields, letters), dtype=torch.uint8, device=device)
    if groups.topology.tensor > 1:
        dist.broadcast(packed, group=groups.tensor, group_src=0)
    views = dict(_views(packed, fields, letters))
    return {name: views[name] for name in fields}


def sequence_shard(batch: Batch, fields: Fields, groups: Groups) -> Batch:
    """Return this rank's share of the sequences: a part of each field with an s.

    With the chunks of ring attention, sequences that cannot be divided evenly are padded with zeros:
    tokens that no other sees, and that do not count in the loss.
    """
    topology, rank = groups.topology, groups.sequence_rank
    if topology.sequence == 1:
        return batch
    parts = {}
    for name, tensor in batch.items():
        shape = fields[name].shape
        if topology.zigzag and (dims := [shape.find(mark) for mark in "sS" if mark in shape]):
            tensor = _pad(tensor, dims[0], 2 * topology.sequence)
        if "s" in shape:
            tensor = _share(tensor, shape.index("s"), rank, topology).contiguous()
        parts[name] = tensor
    return parts


def _pad(x: Tensor, dim: int, multiple: int) -> Tensor:
    """Return `x` padded with zeros along `dim`, up to a multiple."""
    padding = list(x.shape)
    padding[dim] = -x.size(dim) % multiple
    return torch.cat([x, x.new_zeros(padding)], dim) if padding[dim] else x


def _share(x: Tensor, dim: int, rank: int, topology: Topology) -> Tensor:
    if not topology.zigzag:
        return x.chunk(topology.sequence, dim)[rank]
    chunks = x.chunk(2 * topology.sequence, dim)
    return torch.cat([chunks[i] for i in zigzag_chunks(rank, topology.sequence)], dim)


def _num_bytes(fields: Fields, letters: Mapping[str, int]) -> int:
    return sum(prod(field.sizes(letters)) * field.dtype.itemsize for field in fields.values())


def _views(
    packed: Tensor, fields: Fields, letters: Mapping[str, int]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the part of `packed` of each field: large dtypes first, for alignment."""
    start = 0
    for name, field in sorted(fields.items(), key=lambda item: -item[1].dtype.itemsize):
        sizes = field.sizes(letters)
        stop = start + prod(sizes) * field.dtype.itemsize
        yield name, packed[start:stop].view(field.dtype).view(sizes)
        start = stop


def _require_declared(batch: Batch, fields: Fields, letters: Mapping[str, int]) -> None:
    if batch.keys() != fields.keys():
        raise ValueError(f"the batch has the fields {[*batch]}, declared are {[*fields]}")
    for name, field in fields.items():
        if batch[name].shape != field.sizes(letters):
            raise ValueError(
                f"the field {name} of the batch has shape {[*batch[name].shape]}; declared is "
                f"{field.shape}, which is {[*field.sizes(letters)]}"
            )
        if batch[name].dtype != field.dtype:
            raise ValueError(
                f"the field {name} of the batch has dtype {batch[name].dtype}; declared is "
                f"{field.dtype}"
            )
