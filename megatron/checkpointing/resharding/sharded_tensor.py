"""Reassemble sharded tensors and cut shards for another layout (resharding)."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron.tensor_parallel.sharding import ExpertShare, Shard

OPTIMIZER_NAMES = "optimizer_names"
"""Key of a saved state with the parameter names of the optimizer's numbered states."""

BUFFER_BYTES = 64 << 20
"""Default size of the buffer used while a tensor is filled."""

_ALL = ExpertShare(0, 1)

_COPIES = 2  # of a block in memory: the shards and the rows joined from them


@dataclass(frozen=True)
class FlatShard:
    """One shard, flattened, in several consecutive tensors; elements after its last one are padding."""

    tensors: Sequence[Tensor]

    @property
    def numel(self) -> int:
        """Elements in all tensors, padding included."""
        return sum(tensor.numel() for tensor in self.tensors)

    def flat(self, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop`, exclusive."""
        found, first = [], 0
        for tensor in self.tensors:
            low, high = max(start, first), min(stop, first + tensor.numel())
            if low < high:
                found.append(tensor[low - first : high - first])
            first += tensor.numel()
        return found[0] if len(found) == 1 else torch.cat(found)

    @property
    def element_size(self) -> int:
        """Bytes of an element."""
        return self.tensors[0].element_size()


@dataclass(frozen=True, kw_only=True)
class StoredShard:
    """One shard, flattened, in files that are read when elements in them are needed.

    It lies in equal partitions, such as ZeRO's, in order and one file each. Their number
    costs nothing here.

    Args:
        numel: elements of the shard.
        element_size: bytes of an element.
        first: index of its first element in the joined partitions.
        partition: elements in each of them.
        read: returns elements of a partition, by its number, the first element and the end.
    """

    numel: int
    element_size: int
    first: int
    partition: int
    read: Callable[[int, int, int], Tensor]

    def flat(self, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop`, exclusive."""
        found, at, end = [], self.first + start, self.first + stop
        while at < end:
            number, low = divmod(at, self.partition)
            high = min(self.partition, low + end - at)
            found.append(self.read(number, low, high))
            at += high - low
        return found[0] if len(found) == 1 else torch.cat(found)


@dataclass(frozen=True, kw_only=True)
class ShardedTensor:
    """A full tensor divided into equal shards along `dim`; None for one replicated on every rank.

    Args:
        shape: full shape, at least one dimension.
        stored: rows in the shards; further rows of `shape` are zeros.
        copies_last: further rows are copies of the last stored row instead.
        stacks: parts of the rows (experts) with separate shards, one after the other.

    Raises:
        ValueError: the shards have too few elements.
    """

    shape: tuple[int, ...]
    dim: int | None
    shards: Sequence[FlatShard | StoredShard]
    stored: int
    copies_last: bool = False
    stacks: int = 1

    def __post_init__(self) -> None:
        parts = self.stacks if self.dim is None else len(self.shards)
        wanted = self.stored * self.width // parts
        for number, shard in enumerate(self.shards):
            if shard.numel < wanted:
                raise ValueError(f"shard {number} has {shard.numel} elements instead of {wanted}")

    @property
    def width(self) -> int:
        """Elements in a row."""
        return math.prod(self.shape[1:])

    @property
    def element_size(self) -> int:
        """Bytes of an element."""
        return self.shards[0].element_size

    @property
    def size(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    def rows(self, start: int, stop: int) -> Tensor:
        """Join rows `start` to `stop` of the full tensor: [stop - start, ...]."""
        if self.stacks > 1:
            return torch.cat([*self._rows_of_stacks(start, stop)])
        if stop > self.stored:
            first = min(start, self.stored - 1)
            block = self.rows(first, self.stored)
            further = block[-1:] if self.copies_last else torch.zeros_like(block[-1:])
            further = further.expand(stop - self.stored, *self.shape[1:])
            return torch.cat([block, further])[start - first :]
        if self.dim == 1:
            width = self.width // len(self.shards)
            parts = [s.flat(start * width, stop * width).view(-1, width) for s in self.shards]
            return torch.cat(parts, 1).view(-1, *self.shape[1:])
        shards = self.shards[:1] if self.dim is None else self.shards
        height = self.stored // len(shards)
        parts = []
        for number, shard in enumerate(shards):
            low, high = max(start - number * height, 0), min(stop - number * height, height)
            if low < high:
                parts.append(shard.flat(low * self.width, high * self.width))
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        return flat.view(-1, *self.shape[1:])

    def _rows_of_stacks(self, start: int, stop: int) -> Iterator[Tensor]:
        height, each = self.stored // self.stacks, len(self.shards) // self.stacks
        shape = (height, *self.shape[1:])
        for number in range(start // height, -(-stop // height)):
            above, own = number * height, self.shards[number * each : (number + 1) * each]
            stack = replace(self, shape=shape, shards=own, stored=height, stacks=1)
            yield stack.rows(max(start - above, 0), min(stop - above, height))

    def all(self) -> Tensor:
        """Join the full tensor."""
        return self.rows(0, self.shape[0])

    def with_rows(self, rows: int, *, copies_last: bool = False) -> "ShardedTensor":
        """Truncate or pad the tensor to `rows` rows, with zeros or copies of the last row."""
        return replace(self, shape=(rows, *self.shape[1:]), copies_last=copies_last)


def wrap_full_tensor(tensor: Tensor) -> ShardedTensor:
    """Wrap a full tensor."""
    shape = tuple(tensor.shape)
    pieces = [FlatShard([tensor.reshape(-1)])]
    return ShardedTensor(shape=shape, dim=None, shards=pieces, stored=shape[0])


class LazyParameters(Mapping[str, "ParameterState"]):
    """Parameters by name, each loaded on access, so that only one is in memory.

    Args:
        loaders: of each.
    """

    def __init__(self, loaders: Mapping[str, Callable[[], "ParameterState"]]):
        self._loaders = loaders

    def __getitem__(self, name: str) -> "ParameterState":
        return self._loaders[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaders)

    def __len__(self) -> int:
        return len(self._loaders)


@dataclass(frozen=True, kw_only=True)
class ParameterState:
    """A parameter: its weight and its optimizer state.

    Args:
        weight: fp32 master weights if the optimizer keeps them.
        states: optimizer state per element, by the optimizer's names.
        steps: optimizer steps taken; None if they are not counted.
    """

    weight: ShardedTensor
    states: Mapping[str, ShardedTensor] = field(default_factory=dict)
    steps: float | None = None

    @property
    def tensors(self) -> dict[str, ShardedTensor]:
        """The weight as "fp32" and every state under its name."""
        return {"fp32": self.weight, **self.states}

    def with_rows(self, rows: int, *, copies_last: bool = False) -> "ParameterState":
        """Change the padding of a token embedding, or of the bias of logits, to `rows` rows in total.

        Args:
            copies_last: pad with copies of the last row instead of zeros. Padding that takes part
                in the softmax has learned small logits, and zeros would be large ones.
        """

        def pad(tensor: ShardedTensor) -> ShardedTensor:
            return tensor.with_rows(rows, copies_last=copies_last)

        states = {name: pad(tensor) for name, tensor in self.states.items()}
        return replace(self, weight=pad(self.weight), states=states)


@dataclass(frozen=True, kw_only=True)
class FullCheckpoint:
    """Unsharded training state: weights, optimizer states and counters, independent of the layout.

    Args:
        parameters: by name.
        counters: DeepSpeed's, by its names.
        loss_scaler: attributes of DeepSpeed's loss scaler; {} if none was saved.
    """

    parameters: Mapping[str, ParameterState]
    counters: Mapping[str, int] = field(default_factory=dict)
    loss_scaler: Mapping[str, Any] = field(default_factory=dict)


def fill_from(
    target: Tensor,
    tensor: ShardedTensor,
    shard: Shard | None,
    shape: Sequence[int],
    start: int = 0,
    *,
    share: ExpertShare = _ALL,
    buffer_bytes: int = BUFFER_BYTES,
) -> None:
    """Fill `target` with elements of one shard of `tensor`.

    Memory: blocks of rows, `buffer_bytes` in all, but at least one row.

    Args:
        target: flat; its dtype may differ.
        shard: which one; None for the full tensor.
        shape: of the shard.
        start: offset of `target` in the flat shard.
        share: experts of the shard, rows of the full tensor.

    Raises:
        ValueError: the shapes do not match.
    """
    dim, index, count = (shard.dim, shard.index, shard.count) if shard else (0, 0, 1)
    if (expected := full_shape(shape, shard, share)) != tensor.shape:
        raise ValueError(f"its shape is {list(tensor.shape)} instead of {list(expected)}")
    width, stop = math.prod(shape[1:]), start + target.numel()
    columns = tensor.shape[1] // count if dim == 1 and count > 1 else None
    above = (share.index + (index if dim == 0 else 0)) * shape[0]
    height = max(1, buffer_bytes // max(1, _COPIES * tensor.width * tensor.element_size))

    def cut(row: int, end: int) -> Tensor:
        block = tensor.rows(above + row, above + end)
        if columns is not None:
            block = block[:, index * columns : (index + 1) * columns]
        return block.reshape(-1)

    for row in range(start // width, -(-stop // width), height):
        end = min(row + height, -(-stop // width))
        low, high = max(start, row * width), min(stop, end * width)
        # Not bound to a name, so that a block is freed before the next is joined.
        target[low - start : high - start].copy_(
            cut(row, end)[low - row * width : high - row * width]
        )


def full_shape(
    shape: Sequence[int], shard: Shard | None, share: ExpertShare = _ALL
) -> tuple[int, ...]:
    """Return the full shape of a tensor whose shards have `shape`."""
    expected = [share.replicas * shape[0], *shape[1:]]
    if shard:
        expected[shard.dim] *= shard.count
    return tuple(expected)
