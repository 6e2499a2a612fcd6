"""Tensor mappings between our parameters and transformers', in both directions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class TensorMapping(Protocol):
    """Reordering of elements; `from_hugging_face` inverts `to_hugging_face` bit for bit."""

    def to_hugging_face(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of transformers'."""
        ...

    def from_hugging_face(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the tensor of ours."""
        ...


@dataclass(frozen=True)
class Identity:
    """One tensor in both, unchanged."""

    def to_hugging_face(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return it."""
        return (tensor,)

    def from_hugging_face(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return it."""
        return tensors[0]


@dataclass(frozen=True)
class Transposed:
    """Matrices [out, in] here, [in, out] in transformers; vectors are unchanged."""

    def to_hugging_face(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the matrices transposed."""
        return (tensor.mT if tensor.dim() > 1 else tensor,)

    def from_hugging_face(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the matrices transposed."""
        return tensors[0].mT if tensors[0].dim() > 1 else tensors[0]


@dataclass(frozen=True, kw_only=True)
class QueriesKeysValues:
    """Fused QKV, rows [groups, {queries, key, value}, head_dim], here; q, k, v in transformers.

    Args:
        groups: key/value heads (query groups).
        queries: query heads in a group.
        head_dim: features per head.
        turns_neighbours: whether rotary positions turn the features 2 i and 2 i + 1 of a head there;
            here i and i + head_dim / 2.
    """

    groups: int
    queries: int
    head_dim: int
    turns_neighbours: bool = False

    def to_hugging_face(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values of all heads."""
        by_group = tensor.unflatten(0, (self.groups, self.queries + 2, self.head_dim))
        query, key, value = by_group.split([self.queries, 1, 1], 1)
        if self.turns_neighbours:
            query, key = (_swap_pairs(x, (2, -1)) for x in (query, key))
        return query.flatten(0, 2), key.flatten(0, 2), value.flatten(0, 2)

    def from_hugging_face(self, tensors: Sequence[Tensor]) -> Tensor:
        """Concatenate the rows group by group."""
        heads = (self.queries, 1, 1)
        query, key, value = (
            tensor.unflatten(0, (self.groups, count, self.head_dim))
            for tensor, count in zip(tensors, heads, strict=True)
        )
        if self.turns_neighbours:
            query, key = (_swap_pairs(x, (-1, 2)) for x in (query, key))
        return torch.cat([query, key, value], 1).flatten(0, 2)


def _swap_pairs(heads: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Transpose the features [groups, heads, features, ...] of each head, viewed in these sizes."""
    return heads.unflatten(2, sizes).transpose(2, 3).flatten(2, 3)


@dataclass(frozen=True)
class Stacked:
    """One tensor in transformers with the rows of several ones, as another mapping has them.

    Args:
        mapping: to the several tensors.
        rows: of each of them.
    """

    mapping: TensorMapping
    rows: tuple[int, ...]

    def to_hugging_face(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the rows of the first, then of the second."""
        return (torch.cat(self.mapping.to_hugging_face(tensor)),)

    def from_hugging_face(self, tensors: Sequence[Tensor]) -> Tensor:
        """Divide the rows."""
        return self.mapping.from_hugging_face(tensors[0].split(self.rows))


@dataclass(frozen=True, kw_only=True)
class TurnedRows:
    """Rows of groups of which some features have rotary positions: in halves here, behind the others.

    In transformers, neighbors are turned together, or halves as here.

    Args:
        groups: attention heads, or 1 for what they share.
        turned: features of each that are turned.
        is_first: whether they are the first ones of a group here; in transformers they are the last.
        are_neighbors: whether transformers turns neighbors.
    """

    groups: int
    turned: int
    is_first: bool
    are_neighbors: bool = True

    def to_hugging_face(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the rows with turned features behind, as neighbors."""
        by_group = tensor.unflatten(0, (self.groups, -1))
        others = by_group.size(1) - self.turned
        if self.is_first:
            turned, plain = by_group.split([self.turned, others], 1)
        else:
            plain, turned = by_group.split([others, self.turned], 1)
        if self.are_neighbors:
            turned = turned.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return (torch.cat([plain, turned], 1).flatten(0, 1),)

    def from_hugging_face(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the rows with turned features in halves."""
        by_group = tensors[0].unflatten(0, (self.groups, -1))
        plain, turned = by_group.split([by_group.size(1) - self.turned, self.turned], 1)
        if self.are_neighbors:
            turned = turned.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        parts = [turned, plain] if self.is_first else [plain, turned]
        return torch.cat(parts, 1).flatten(0, 1)


@dataclass(frozen=True, kw_only=True)
class StackedTransposed:
    """Fused QKV of GPT-2: all queries, then all keys, then all values, transposed to [in, out].

    Args:
        heads: attention heads.
        head_dim: features per head.
    """

    heads: int
    head_dim: int

    @property
    def _parts(self) -> QueriesKeysValues:
        return QueriesKeysValues(groups=self.heads, queries=1, head_dim=self.head_dim)

    def to_hugging_face(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return one tensor of all queries, then all keys, then all values."""
        return Transposed().to_hugging_face(torch.cat(self._parts.to_hugging_face(tensor)))

    def from_hugging_face(self, tensors: Sequence[Tensor]) -> Tensor:
        """Concatenate the rows head by head."""
        return self._parts.from_hugging_face(Transposed().from_hugging_face(tensors).chunk(3))


@dataclass(frozen=True)
class GateUp:
    """Interleaved gate and up, rows [features, {gate, up}], here; two tensors in transformers."""

    def to_hugging_face(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the gates and the ups."""
        return tensor[0::2], tensor[1::2]

    def from_hugging_face(self, tensors: Sequence[Tensor]) -> Tensor:
        """Interleave them."""
        return torch.stack(tuple(tensors), 1).flatten(0, 1)


@dataclass(frozen=True)
class ExpertsGateUp:
    """First matrices of all experts, [experts, interleaved gate and up, h], here; two of each expert there."""

    def to_hugging_face(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return gate and up of the first expert, then of the second."""
        return tuple(part for expert in tensor for part in GateUp().to_hugging_face(expert))

    def from_hugging_face(self, tensors: Sequence[Tensor]) -> Tensor:
        """Interleave gate and up of each expert."""
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        return torch.stack([GateUp().from_hugging_face(pair) for pair in pairs])


@dataclass(frozen=True)
class ExpertMatrices:
    """Second matrices of all experts, [experts, width, h], here; one [h, width] of each expert there."""

    def to_hugging_face(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return each expert's, transposed."""
        return tuple(expert.T for expert in tensor)

    def from_hugging_face(self, tensors: Sequence[Tensor]) -> Tensor:
        """Stack them."""
        return torch.stack([expert.T for expert in tensors])


@dataclass(frozen=True)
class OffsetByOne:
    """Norm weight minus 1 here (layernorm_1p), the weight in transformers; may round."""

    def to_hugging_face(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the weight."""
        return (tensor.float() + 1,)

    def from_hugging_face(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return its difference from 1."""
        return tensors[0].float() - 1
