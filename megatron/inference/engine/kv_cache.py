"""KV cache: stores the keys and values of a layer, and attends to them in prefill and decode.

`CachedAttention` is the core attention of a layer in generation. It depends on the pass:
`Prefill` stores the keys and values of prompts, `Decode` attends from one new token of each sequence to
the cached ones.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.inference.engine.decode_graphs import StepShape
from megatron.inference.engine.device import to_device
from megatron.model.layers.attention_kernels import Attend, ScoreOptions, soft_capped


class CachedAttention:
    """Core attention of one layer, with its KV cache: preallocated, one row for each sequence.

    Args:
        attend: the layer's attention kernel, without a cache.
        current: returns the pass that runs, which says how the cache is read and written.
        groups: query groups of this rank.
        head_dim: features of a head.

    Shapes: query [b, a, s, d], key and value [b, g, s, d] -> [b, a, s, d]; keys and values
        [rows, g, capacity, d].
    """

    def __init__(self, attend: Attend, current: "CurrentStep", *, groups: int, head_dim: int):
        self.attend, self._current = attend, current
        self._sizes = groups, head_dim
        self.keys = self.values = torch.empty(0)

    @property
    def numbers_of_token(self) -> int:
        """How many numbers are cached of each token."""
        return 2 * math.prod(self._sizes)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, how: ScoreOptions) -> Tensor:
        """Update the cache and return the attention output."""
        return self._current().attend(self, query, key, value, how)

    def reserve(self, rows: int, length: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate room for sequences of `length` tokens, with the tokens so far."""
        groups, head_dim = self._sizes
        # Zeros: masked values are multiplied by 0, and 0 * NaN would be NaN.
        keys, values = (
            torch.zeros(rows, groups, length, head_dim, dtype=dtype, device=device) for _ in "kv"
        )
        if self.keys.numel():
            so_far = self.keys.size(2)
            keys[:, :, :so_far], values[:, :, :so_far] = self.keys, self.values
        self.keys, self.values = keys, values

    def clear(self, rows: slice) -> None:
        """Zero these rows."""
        for kept in (self.keys, self.values):
            kept[rows] = 0

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a row to another."""
        for kept in (self.keys, self.values):
            kept[target, :, :length] = kept[source, :, :length]

    def reorder(self, rows: Sequence[int], order: Tensor, length: int) -> None:
        """Copy the first `length` tokens of row rows[i] to row i; `order` are the rows on the device."""
        for kept in (self.keys, self.values):
            kept[: len(rows), :, :length] = kept[order, :, :length]


class Prefill:
    """Prefill: attention over new sequences as in training, which fill the rows from `first` on.

    The padding after shorter sequences is stored too; decode steps overwrite it before any query
    attends to it.

    Args:
        lengths: tokens of each sequence.
    """

    def __init__(self, first: int, lengths: Sequence[int]):
        self.rows = slice(first, first + len(lengths))
        self._lengths = lengths
        self._on_device: Tensor | None = None

    def lengths_on(self, device: torch.device) -> Tensor:
        """Return the number of tokens of each sequence in this pass, [b] int64."""
        if self._on_device is None:
            self._on_device = to_device(self._lengths, device)
        return self._on_device

    def attend(
        self, layer: CachedAttention, query: Tensor, key: Tensor, value: Tensor, how: ScoreOptions
    ) -> Tensor:
        """Store keys and values, and attend without the cache."""
        length = key.size(2)
        layer.keys[self.rows, :, :length] = key
        layer.values[self.rows, :, :length] = value
        return layer.attend(query, key, value, _with_bias(how, query.size(2), length))


class Decode:
    """Decode step: row i attends from one new token at positions_b[i] to its cached tokens.

    Args:
        positions_b: one for each of the first rows.
        shape: range of the positions; the step reads all else from device tensors, so that it can
            be captured as a CUDA graph.
        lengths: tokens of each row with its new one, if core attention is a plugin's, which then
            attends to the cache too.
    """

    def __init__(
        self,
        positions_b: Tensor,
        shape: StepShape,
        *,
        lengths: Sequence[int] = (),
    ):
        self.rows = slice(0, len(positions_b))
        self.positions, self.shape = positions_b, shape
        self._lengths = lengths
        self._slots: dict[tuple[int, int], Tensor] = {}
        self._views: dict[tuple[int, int, int], _View] = {}

    def lengths_on(self, device: torch.device) -> Tensor:
        """Return the number of tokens of each sequence in this pass, [b] int64."""
        return torch.ones_like(self.positions)

    def attend(
        self, layer: CachedAttention, query: Tensor, key: Tensor, value: Tensor, how: ScoreOptions
    ) -> Tensor:
        """Store the key and the value, and attend to all cached tokens of the row.

        Queries that share a key (grouped-query attention) are passed like positions of one
        sequence, so that keys and values need no copies.
        """
        keys, values = layer.keys, layer.values
        batch, heads, _, head_dim = query.shape
        groups = key.size(1)
        layers = how.mask.window, groups, heads  # the key of a view
        if layers not in self._views:
            # Once for all layers that are alike.
            self._views[layers] = self._view(*layers, how, query.dtype)
        view = self._views[layers]
        if self.shape.is_even:
            position = self.shape.start
            keys[:batch, :, position] = key.squeeze(2)
            values[:batch, :, position] = value.squeeze(2)
        else:
            slots = self._slots_of(groups, keys.size(2))
            for kept, new in ((keys, key), (values, value)):
                size = kept.size(3)
                kept.view(-1, size).index_copy_(0, slots, new.reshape(-1, size))
        if self._lengths:
            # Row by row: such attention takes queries to be the last positions of the keys.
            return torch.cat(
                [
                    layer.attend(
                        query[i, None],
                        keys[i, None, :, :stop],
                        values[i, None, :, :stop],
                        _with_bias(how, 1, stop),
                    )
                    for i, stop in enumerate(self._lengths)
                ]
            )
        visible = slice(view.first, self.shape.stop)
        output = _attention(
            query.view(batch, groups, heads // groups, head_dim),
            keys[:batch, :, visible],
            values[:batch, :, visible],
            view.bias,
            how,
        )
        return output.reshape(batch, heads, 1, head_dim)

    def _slots_of(self, groups: int, capacity: int) -> Tensor:
        """Return the slots of the new keys and values in the flattened caches of these sizes."""
        sizes = groups, capacity
        if sizes not in self._slots:
            positions_b1 = self.positions[:, None]
            rows = torch.arange(len(positions_b1) * groups, device=positions_b1.device)
            self._slots[sizes] = (rows.view(-1, groups) * capacity + positions_b1).flatten()
        return self._slots[sizes]

    def _view(
        self, window: int, groups: int, heads: int, how: ScoreOptions, dtype: torch.dtype
    ) -> "_View":
        """Return the cached positions visible with a sliding `window`, and their bias."""
        shape, slopes_a = self.shape, how.slopes_a
        first = max(0, shape.start - window + 1) if window else 0
        if shape.is_even and slopes_a is None and how.relative is None:
            return _View(first, None)
        positions = self.positions[:, None, None]
        offset_b1k = torch.arange(first, shape.stop, device=positions.device) - positions
        bias = torch.zeros_like(offset_b1k, dtype=torch.float32)[:, None]
        if slopes_a is not None:
            bias = slopes_a.view(groups, heads // groups, 1) * offset_b1k[:, None]
        if how.relative is not None:
            by_head = how.relative.at(offset_b1k[:, 0]).transpose(1, 2)
            bias = bias + by_head.unflatten(1, (groups, heads // groups))
        hidden = offset_b1k > 0
        if window:
            hidden = hidden | (offset_b1k <= -window)
        return _View(first, bias.masked_fill(hidden[:, None], -torch.inf).to(dtype))


def _with_bias(how: ScoreOptions, sq: int, sk: int) -> ScoreOptions:
    """Return `how` with the bias of relative positions, for attention without a cache."""
    return replace(how, bias=how.relative.bias(sq, sk), relative=None) if how.relative else how


def _attention(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, how: ScoreOptions
) -> Tensor:
    """Return softmax(scores + bias) @ values."""
    if not how.softcap:
        return F.scaled_dot_product_attention(query, keys, values, bias, scale=how.scale)
    scores = soft_capped((query * how.scale) @ keys.mT, how.softcap)
    scores = scores if bias is None else scores + bias
    return (
        scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
        @ values
    )


CurrentStep = Callable[[], Prefill | Decode]
"""Returns the pass that runs."""


@dataclass(frozen=True)
class _View:
    """Cached positions a decode step attends to: from `first` on, with `bias` on the scores."""

    first: int
    bias: Tensor | None
