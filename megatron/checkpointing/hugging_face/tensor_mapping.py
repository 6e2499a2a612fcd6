"""How one tensor of ours is cut into those of transformers', and put together from them again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class TensorMapping(Protocol):
    """The same numbers in another order. `together` undoes `apart` bit for bit."""

    def to_hugging_face(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of transformers'."""
        ...

    def from_hugging_face(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the tensor of ours."""
        ...


@dataclass(frozen=True)
class Identity:
    """Both have the same tensor."""

    def to_hugging_face(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return it."""
        return (tensor,)

    def from_hugging_face(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return it."""
        return tensors[0]


@dataclass(frozen=True)
class Transposed:
    """A matrix [out, in] here, [in, out] there; a vector is the same."""

    def to_hugging_face(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the matrix transposed."""
        return (tensor.T if tensor.dim() == 2 else tensor,)

    def from_hugging_face(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the matrix transposed."""
        return tensors[0].T if tensors[0].dim() == 2 else tensors[0]


@dataclass(frozen=True, kw_only=True)
class QueriesKeysValues:
    """Rows [groups, {queries of the group, key, value}, head_dim] here, three tensors there.

    Args:
        groups: keys and values per token.
        queries: heads in a group.
        head_dim: features per head.
    """

    groups: int
    queries: int
    head_dim: int

    def to_hugging_face(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values of all heads."""
        by_group = tensor.unflatten(0, (self.groups, self.queries + 2, self.head_dim))
        query, key, value = by_group.split([self.queries, 1, 1], 1)
        return query.flatten(0, 2), key.flatten(0, 2), value.flatten(0, 2)

    def from_hugging_face(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the rows of each group behind one another."""
        heads = (self.queries, 1, 1)
        parts = [
            tensor.unflatten(0, (self.groups, count, self.head_dim))
            for tensor, count in zip(tensors, heads, strict=True)
        ]
        return torch.cat(parts, 1).flatten(0, 2)


@dataclass(frozen=True, kw_only=True)
class StackedTransposed:
    """The queries, keys and values of all heads above one another there, and [in, out].

    Args:
        heads: how many of each.
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
        """Return the rows of each head behind one another."""
        return self._parts.from_hugging_face(Transposed().from_hugging_face(tensors).chunk(3))


@dataclass(frozen=True)
class GateUp:
    """Rows [features, {gate, up}] here, two tensors there."""

    def to_hugging_face(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the gates and the ups."""
        return tensor[0::2], tensor[1::2]

    def from_hugging_face(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return them by turns."""
        return torch.stack(tuple(tensors), 1).flatten(0, 1)


@dataclass(frozen=True)
class OffsetByOne:
    """The weight of a norm less 1 here, the weight there; the only mapping that may round."""

    def to_hugging_face(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the weight."""
        return (tensor.float() + 1,)

    def from_hugging_face(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return its difference from 1."""
        return tensors[0].float() - 1
