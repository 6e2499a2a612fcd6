"""Tensor mappings of recurrent layers: rows of groups here, one part after the other in transformers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupedRows:
    """Rows [groups, {parts}] here; in transformers all rows of the first part, then of the second.

    Args:
        groups: such as heads.
        sizes: rows of each part in a group.
    """

    groups: int
    sizes: tuple[int, ...]

    def to_hugging_face(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the rows part by part."""
        parts = tensor.unflatten(0, (self.groups, -1)).split(self.sizes, 1)
        return (torch.cat([part.flatten(0, 1) for part in parts]),)

    def from_hugging_face(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the rows group by group."""
        parts = tensors[0].split([self.groups * size for size in self.sizes])
        return torch.cat([part.unflatten(0, (self.groups, -1)) for part in parts], 1).flatten(0, 1)


@dataclass(frozen=True)
class ConvolutionWeight(GroupedRows):
    """The same of a convolution, whose weight there has a dimension of size 1 more."""

    def to_hugging_face(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the channels part by part, [channels, 1, kernel]."""
        (rows,) = super().to_hugging_face(tensor)
        return (rows[:, None],)

    def from_hugging_face(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the channels group by group, [channels, kernel]."""
        return super().from_hugging_face([tensors[0].squeeze(1)])


@dataclass(frozen=True)
class SplitGroups:
    """Rows [groups, {parts}] here; in transformers a tensor with the same groups for each part.

    Args:
        groups: such as heads.
        sizes: rows of each part in a group.
    """

    groups: int
    sizes: tuple[int, ...]

    def to_hugging_face(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the parts, each group by group."""
        parts = tensor.unflatten(0, (self.groups, -1)).split(self.sizes, 1)
        return tuple(part.flatten(0, 1) for part in parts)

    def from_hugging_face(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the groups, each part by part."""
        return torch.cat([each.unflatten(0, (self.groups, -1)) for each in tensors], 1).flatten(
            0, 1
        )


@dataclass(frozen=True)
class Experts:
    """Matrices of all experts, [experts, width, h], here; one matrix [width, h] of each expert there."""

    def to_hugging_face(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return each expert's."""
        return tuple(tensor)

    def from_hugging_face(self, tensors: Sequence[Tensor]) -> Tensor:
        """Stack them."""
        return torch.stack(tuple(tensors))


@dataclass(frozen=True, kw_only=True)
class GatedQueriesKeysValues:
    """Fused QKV with output gates, rows [groups, {queries, gates, key, value}, head_dim], here.

    In transformers rows of queries are [heads, {query, gate}, head_dim]; keys and values are apart.

    Args:
        groups: key/value heads (query groups).
        queries: query heads in a group.
        head_dim: features per head.
    """

    groups: int
    queries: int
    head_dim: int

    def to_hugging_face(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return queries with gates, keys and values of all heads."""
        by_group = tensor.unflatten(0, (self.groups, 2 * self.queries + 2, self.head_dim))
        query, gate, key, value = by_group.split([self.queries, self.queries, 1, 1], 1)
        pairs = torch.stack([query, gate], 2)
        return pairs.flatten(0, 3), key.flatten(0, 2), value.flatten(0, 2)

    def from_hugging_face(self, tensors: Sequence[Tensor]) -> Tensor:
        """Concatenate the rows group by group."""
        pairs, key, value = tensors
        query, gate = pairs.unflatten(0, (self.groups, self.queries, 2, self.head_dim)).unbind(2)
        key, value = (x.unflatten(0, (self.groups, 1, self.head_dim)) for x in (key, value))
        return torch.cat([query, gate, key, value], 1).flatten(0, 2)
