"""Whole tensors whose elements lie in pieces, and how any piece of another layout is cut from them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron.tensor_parallel.sharding import Shard

OPTIMIZER_NAMES = "optimizer_names"
"""Where a saved state says which parameters the optimizer's numbered states are of."""

BUFFER_BYTES = 64 << 20
"""The memory that is taken beside what is filled, where nobody says how much."""

_COPIES = 2  # of a block, at once: shards put together from pieces, and rows from shards


@dataclass(frozen=True)
class FlatShard:
    """The elements of one shard in order, in several flat tensors.

    What lies behind the shard's last element is padding.
    """

    tensors: Sequence[Tensor]

    @property
    def numel(self) -> int:
        """Elements in all tensors, padding included."""
        return sum(tensor.numel() for tensor in self.tensors)

    def flat(self, start: int, stop: int) -> Tensor:
        """Return the elements from `start` on, `stop` excluded."""
        found, first = [], 0
        for tensor in self.tensors:
            low, high = max(start, first), min(stop, first + tensor.numel())
            if low < high:
                found.append(tensor[low - first : high - first])
            first += tensor.numel()
        return found[0] if len(found) == 1 else torch.cat(found)


@dataclass(frozen=True, kw_only=True)
class ShardedTensor:
    """One tensor, divided into equal shards along `dim`; None for one that every rank had whole.

    Args:
        shape: of the tensor, one dimension at least.
        shards: the pieces of each.
        stored: rows that the shards hold; further ones of `shape` are zeros.
        copies_last: further rows are copies of the last stored one instead.

    Raises:
        ValueError: the shards do not make up the tensor.
    """

    shape: tuple[int, ...]
    dim: int | None
    shards: Sequence[FlatShard]
    stored: int
    copies_last: bool = False

    def __post_init__(self) -> None:
        parts = 1 if self.dim is None else len(self.shards)
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
        return self.shards[0].tensors[0].element_size()

    @property
    def size(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows in the shape of the whole: [stop - start, ...]."""
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

    def all(self) -> Tensor:
        """Return the whole tensor."""
        return self.rows(0, self.shape[0])

    def with_rows(self, rows: int, *, copies_last: bool = False) -> "ShardedTensor":
        """Return the tensor cut off or continued to `rows` rows, with zeros or the last one."""
        return replace(self, shape=(rows, *self.shape[1:]), copies_last=copies_last)


def unsharded(tensor: Tensor) -> ShardedTensor:
    """Return `tensor` as the whole that it is."""
    shape = tuple(tensor.shape)
    pieces = [FlatShard([tensor.reshape(-1)])]
    return ShardedTensor(shape=shape, dim=None, shards=pieces, stored=shape[0])


class LazyParameters(Mapping[str, "ParameterState"]):
    """Parameters by name, each put together when it is asked for, so that one is in memory.

    Args:
        makers: of each.
    """

    def __init__(self, makers: Mapping[str, Callable[[], "ParameterState"]]):
        self._makers = makers

    def __getitem__(self, name: str) -> "ParameterState":
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


@dataclass(frozen=True, kw_only=True)
class ParameterState:
    """A weight of the network with what the optimizer keeps of it.

    Args:
        weight: in 32 bits where an optimizer keeps it so.
        states: what the optimizer keeps per element, by its own names.
        steps: how many the optimizer has taken with it; None where it does not count.
    """

    weight: ShardedTensor
    states: Mapping[str, ShardedTensor] = field(default_factory=dict)
    steps: float | None = None

    @property
    def tensors(self) -> dict[str, ShardedTensor]:
        """The weight as "fp32" and every state under its own name."""
        return {"fp32": self.weight, **self.states}

    def with_rows(self, rows: int, *, copies_last: bool = False) -> "ParameterState":
        """Return a table of tokens with other padding: `rows` rows in all.

        Args:
            copies_last: further rows are copies of the last one, and not zeros. Padding that takes
                part in the softmax has learned small logits, where zeros would be large ones.
        """

        def padded(whole: ShardedTensor) -> ShardedTensor:
            return whole.with_rows(rows, copies_last=copies_last)

        states = {name: padded(whole) for name, whole in self.states.items()}
        return replace(self, weight=padded(self.weight), states=states)


@dataclass(frozen=True, kw_only=True)
class FullCheckpoint:
    """A state of training, whatever the layout of the run that saved it.

    Args:
        parameters: by name.
        counters: DeepSpeed's, by its names.
        loss_scaler: the attributes of DeepSpeed's; {} where none was saved.
    """

    parameters: Mapping[str, ParameterState]
    counters: Mapping[str, int] = field(default_factory=dict)
    loss_scaler: Mapping[str, Any] = field(default_factory=dict)


def fill_from(
    target: Tensor,
    whole: ShardedTensor,
    shard: Shard | None,
    shape: Sequence[int],
    start: int = 0,
    *,
    buffer_bytes: int = BUFFER_BYTES,
) -> None:
    """Fill `target` with elements of one shard of `whole`.

    Memory: a block of rows at a time, of `buffer_bytes` with all copies on its way, whatever the
    size of the whole. One row is the least.

    Args:
        target: flat; its type may differ from the whole's.
        shard: which one; None for all of it.
        shape: the shard's.
        start: where in the flat shard `target` begins.

    Raises:
        ValueError: the shard is not one of `whole`.
    """
    dim, index, count = (shard.dim, shard.index, shard.count) if shard else (0, 0, 1)
    if (expected := full_shape(shape, shard)) != whole.shape:
        raise ValueError(f"its shape is {list(whole.shape)} instead of {list(expected)}")
    width, stop = math.prod(shape[1:]), start + target.numel()
    columns = whole.shape[1] // count if dim == 1 else None
    above = index * shape[0] if dim == 0 else 0
    height = max(1, buffer_bytes // max(1, _COPIES * whole.width * whole.element_size))

    def cut(row: int, end: int) -> Tensor:
        block = whole.rows(above + row, above + end)
        if columns is not None:
            block = block[:, index * columns : (index + 1) * columns]
        return block.reshape(-1)

    for row in range(start // width, -(-stop // width), height):
        end = min(row + height, -(-stop // width))
        low, high = max(start, row * width), min(stop, end * width)
        # Without a name for it, a block is gone before the next is made.
        target[low - start : high - start].copy_(
            cut(row, end)[low - row * width : high - row * width]
        )


def full_shape(shape: Sequence[int], shard: Shard | None) -> tuple[int, ...]:
    """Return the shape of what a shard of `shape` is one of."""
    expected = list(shape)
    if shard:
        expected[shard.dim] *= shard.count
    return tuple(expected)
