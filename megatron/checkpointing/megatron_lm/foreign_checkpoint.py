"""What a checkpoint of another program holds, in the names and rows of this one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpointing.resharding.sharded_tensor import FullCheckpoint
from megatron.common.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class ForeignCheckpoint:
    """A state of training that another program left.

    Args:
        folder: where its files lie.
        flags: words of a command line of ours for a network like it, as far as the files tell.
        rows: of the table of tokens, padding included.
        vocab_size: tokens without padding; None where the files do not tell.
        whole: the weights, and what the optimizer keeps if that can be read.
        state: fields of TrainState.
        has_optimizer: whether `whole` has its states.
        notices: what is left out, one sentence each.
    """

    folder: Path
    flags: Sequence[str]
    rows: int
    vocab_size: int | None
    whole: FullCheckpoint
    state: Mapping[str, int] = field(default_factory=dict)
    has_optimizer: bool = False
    notices: Sequence[str] = ()


COLUMN = (
    "self_attention.query_key_value.weight",
    "self_attention.query_key_value.bias",
    "mlp.dense_h_to_4h.weight",
    "mlp.dense_h_to_4h.bias",
    "word_embeddings.weight",
)
"""Ends of the names of parameters whose rows are divided."""
ROW = ("self_attention.dense.weight", "mlp.dense_4h_to_h.weight")
"""Ends of the names of those whose columns are."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """In which order the rows of fused weights lie in a shard.

    Args:
        version: of Megatron-LM's checkpoints: 0 has {q, k, v}, heads, features; 1 has heads,
            features, {q, k, v}; from 2 on heads, {q, k, v}, features, as here.
        head_dim: features per head.
        gate: which half of the rows of a gated MLP is the gate; None for a plain MLP.
    """

    version: float
    head_dim: int
    gate: int | None

    def whole(self, name: str, shards: Sequence[Tensor]) -> Tensor:
        """Return the whole of the parameter `name` in our rows.

        Raises:
            ValueError: the shards have not the shapes that they should have.
        """
        if name.endswith(ROW):
            return shards[0] if len(shards) == 1 else torch.cat(tuple(shards), 1)
        if not name.endswith(COLUMN):
            return _shared(shards)
        if ".query_key_value." in name and self.version < 2:
            shards = [self._by_head(shard) for shard in shards]
        elif ".dense_h_to_4h." in name and self.gate is not None:
            shards = [self._in_pairs(shard) for shard in shards]
        return shards[0] if len(shards) == 1 else torch.cat(tuple(shards))

    def _by_head(self, shard: Tensor) -> Tensor:
        if self.version == 0:
            return shard.unflatten(0, (3, -1, self.head_dim)).transpose(0, 1).flatten(0, 2)
        return shard.unflatten(0, (-1, self.head_dim, 3)).transpose(1, 2).flatten(0, 2)

    def _in_pairs(self, shard: Tensor) -> Tensor:
        halves = shard.unflatten(0, (2, -1))
        gate, up = (halves[self.gate], halves[1 - self.gate]) if self.gate is not None else halves
        return torch.stack((gate, up), 1).flatten(0, 1)


def _shared(shards: Sequence[Tensor]) -> Tensor:
    """Return what every rank has a copy of: the mean, where rounding has driven copies apart."""
    first = shards[0]
    if all(torch.equal(first, other) for other in shards[1:]):
        return first
    return torch.stack([shard.float() for shard in shards]).mean(0).to(first.dtype)


def known_version(version: float, where: object) -> float:
    """Return `version`.

    Raises:
        CheckpointError: nobody knows its rows.
    """
    if version not in (0, 1) and not 2 <= version < 4:
        raise CheckpointError(
            f"{where}: checkpoint_version {version} is not known; 0, 1, 2 and 3 are"
        )
    return version
