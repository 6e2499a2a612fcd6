"""Keys and values of tokens that were read before, and attention over them.

A `CachedAttention` is the core attention of a layer. What it does in a forward
pass is the turn of the cache: to keep what prompts are made of, or to look back from one new token
of each sequence. The layers know nothing of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.common.errors import ConfigError
from megatron.model.layers.attention_kernels import Attend, CoreAttention, Weighing, soft_capped


class Turn(Protocol):
    """What the layers' attention does in one forward pass."""

    def attend(
        self,
        keys: Tensor,
        values: Tensor,
        attend: Attend,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        how: Weighing,
    ) -> Tensor:
        """Return the mixed values.

        Args:
            keys: the layer's part of the cache, [rows, g, most tokens, d].
            values: likewise.
            attend: what the layer would call.

        Shapes: query [b, a, s, d], key and value [b, g, s, d] -> [b, a, s, d].
        """
        ...


class Cache:
    """Keys and values of all layers: a row for each sequence, in memory from the beginning.

    Args:
        layers: numbers of the layers of this stage, from 1 on over all stages.
        groups: query groups of this rank.
        head_dim: features of a head.
        rows: most sequences at once.
        max_length: most tokens of each.

    Shapes: keys and values [layers, rows, g, max_length, d].
    """

    def __init__(
        self,
        layers: range,
        *,
        groups: int,
        head_dim: int,
        rows: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self._layers = layers
        shape = (len(layers), rows, groups, max_length, head_dim)
        try:
            # Zeros: what is hidden is multiplied by 0, and that of a stray NaN would be one.
            self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in "kv")
        except RuntimeError as error:
            size = 2 * dtype.itemsize * torch.Size(shape).numel() / 2**30
            raise ConfigError(
                f"keys and values of {rows} sequences of {max_length} tokens take {size:.1f} GiB, "
                "which is more than there is: lower --micro-batch-size or "
                "--inference-max-seq-length"
            ) from error
        self.turn: Turn = Prompts(0)

    def core_attention(self, attend: Attend) -> CoreAttention:
        """Return attention that reads and writes this cache, for the layer of a number.

        Args:
            attend: computes attention where the cache is not looked at.
        """
        return lambda number: CachedAttention(attend, self, self._layers.index(number))

    def clear(self, rows: slice) -> None:
        """Forget what is no number: the next sequences of these rows would multiply it by 0."""
        for kept in (self.keys, self.values):
            kept[:, rows] = 0

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of the row `source` to the row `target`."""
        for kept in (self.keys, self.values):
            kept[:, target, :, :length] = kept[:, source, :, :length]

    def reorder(self, rows: Sequence[int], length: int) -> None:
        """Let row i have the first `length` tokens of the row rows[i]."""
        if list(rows) == list(range(len(rows))):
            return
        order = torch.tensor(rows, device=self.keys.device)
        for kept in (self.keys, self.values):
            for layer in kept:
                layer[: len(rows), :, :length] = layer[order, :, :length]


class CachedAttention:
    """The attention of one layer, which does as the turn of the cache says."""

    def __init__(self, attend: Attend, cache: Cache, number: int):
        self.attend, self.cache = attend, cache
        self.keys, self.values = cache.keys[number], cache.values[number]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, how: Weighing) -> Tensor:
        """Return the mixed values."""
        turn = self.cache.turn
        return turn.attend(self.keys, self.values, self.attend, query, key, value, how)


class Prompts:
    """New sequences are read from their beginnings, and kept in the rows from `first` on.

    They attend to themselves as in training. What lies behind the end of a shorter one is kept
    too, but nobody looks there before it is overwritten.
    """

    def __init__(self, first: int):
        self.first = first

    def attend(
        self,
        keys: Tensor,
        values: Tensor,
        attend: Attend,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        how: Weighing,
    ) -> Tensor:
        """Keep keys and values, and attend without a cache."""
        batch, _, length, _ = key.shape
        rows = slice(self.first, self.first + batch)
        keys[rows, :, :length] = key
        values[rows, :, :length] = value
        return attend(query, key, value, how)


class NextTokens:
    """Row i of the cache goes on with one token, at the position places[i].

    Args:
        places: a position for each of the first rows.
        max_length: of the cache.
    """

    def __init__(self, places: Sequence[int], *, max_length: int, device: torch.device):
        self.places = torch.tensor(places, device=device)
        self.start, self.stop = min(places), max(places) + 1
        self.max_length = max_length
        self.is_even = self.start == self.stop - 1
        self._slots = self.places
        self._looks: dict[int, _Look] = {}

    def attend(
        self,
        keys: Tensor,
        values: Tensor,
        attend: Attend,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        how: Weighing,
    ) -> Tensor:
        """Keep the key and the value, and attend to all that the row has.

        The queries that share a key are handed over like positions of one sequence, so that
        neither keys nor values are copied for them.
        """
        batch, heads, _, head_dim = query.shape
        groups = key.size(1)
        if not self._looks:
            self._find_slots(groups)
        window = how.mask.window
        if window not in self._looks:
            # Once for all layers with this window.
            self._looks[window] = self._look(window, groups, heads, how.slopes_a, query.dtype)
        look = self._looks[window]
        if self.is_even:
            place = self.stop - 1
            keys[:batch, :, place] = key.squeeze(2)
            values[:batch, :, place] = value.squeeze(2)
        else:
            for kept, new in ((keys, key), (values, value)):
                kept.view(-1, head_dim).index_copy_(0, self._slots, new.reshape(-1, head_dim))
        seen = slice(look.first, self.stop)
        mixed = _mixed(
            query.view(batch, groups, heads // groups, head_dim),
            keys[:batch, :, seen],
            values[:batch, :, seen],
            look.bias,
            how,
        )
        return mixed.reshape(batch, heads, 1, head_dim)

    def _find_slots(self, groups: int) -> None:
        """Find out where in the cache, seen as one row of all, the new keys and values lie."""
        places, device = self.places, self.places.device
        rows = torch.arange(len(places) * groups, device=device) * self.max_length
        self._slots = rows + places.repeat_interleave(groups)

    def _look(
        self, window: int, groups: int, heads: int, slopes_a: Tensor | None, dtype: torch.dtype
    ) -> "_Look":
        """Return what the new tokens see with a `window`; 0 for no limit."""
        first = max(0, self.start - window + 1) if window else 0
        if self.is_even and slopes_a is None:
            return _Look(first, None)
        places, device = self.places, self.places.device
        behind_b1k = torch.arange(first, self.stop, device=device) - places[:, None, None]
        bias = torch.zeros_like(behind_b1k, dtype=torch.float32)[:, None]
        if slopes_a is not None:
            bias = slopes_a.view(groups, heads // groups, 1) * behind_b1k[:, None]
        hidden = behind_b1k > 0
        if window:
            hidden = hidden | (behind_b1k <= -window)
        return _Look(first, bias.masked_fill(hidden[:, None], -torch.inf).to(dtype))


def _mixed(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, how: Weighing
) -> Tensor:
    """Return the values mixed by softmax(scores + bias)."""
    if not how.softcap:
        return F.scaled_dot_product_attention(query, keys, values, bias, scale=how.scale)
    scores = soft_capped((query * how.scale) @ keys.mT, how.softcap)
    scores = scores if bias is None else scores + bias
    return (
        scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
        @ values
    )


@dataclass(frozen=True)
class _Look:
    """What new tokens see: the cache from the position `first` on, with `bias` on the scores."""

    first: int
    bias: Tensor | None
