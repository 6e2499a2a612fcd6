"""KV cache: stores the keys and values of all layers, and attends to them in prefill and decode.

`KVCache.core_attention` builds the core attention of each layer. The cache's `mode` selects what a
forward pass does: `Prefill` stores the keys and values of prompts, `Decode` attends from one new
token of each sequence to the cached ones. The layers themselves do not change.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.common.errors import ConfigError
from megatron.inference.engine.decode_graphs import StepShape
from megatron.inference.engine.device import to_device
from megatron.model.layers.attention_kernels import Attend, CoreAttention, Weighing, soft_capped


class KVCache:
    """Preallocated keys and values of all layers: one row for each sequence.

    Args:
        layers: numbers of the layers of this stage, from 1 on over all stages.
        groups: query groups of this rank.
        head_dim: features of a head.
        rows: most sequences at once.
        max_length: most tokens of a sequence.

    Shapes: keys and values [layers, rows, g, max_length, d].
    """

    others: tuple[Tensor, ...] = ()
    """Further tensors with a row for each sequence, which move with it."""

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
            # Zeros: masked values are multiplied by 0, and 0 * NaN would be NaN.
            self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in "kv")
        except RuntimeError as error:
            size = 2 * dtype.itemsize * torch.Size(shape).numel() / 2**30
            raise ConfigError(
                f"the KV cache of {rows} sequences of {max_length} tokens takes {size:.1f} GiB, "
                "more than there is memory: lower --micro-batch-size or --inference-max-seq-length"
            ) from error
        self.mode: Prefill | Decode = Prefill(0)

    def core_attention(self, attend: Attend) -> CoreAttention:
        """Return attention that reads and writes this cache, for the layer with a given number.

        Args:
            attend: the attention kernel of prefill.
        """
        return lambda number: CachedAttention(attend, self, self._layers.index(number))

    def clear(self, rows: slice) -> None:
        """Zero these rows after NaN: masked values of the next sequences are multiplied by 0."""
        for kept in (self.keys, self.values):
            kept[:, rows] = 0
        for other in self.others:
            other[rows] = 0

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of the row `source` to the row `target`."""
        for kept in (self.keys, self.values):
            kept[:, target, :, :length] = kept[:, source, :, :length]
        for other in self.others:
            other[target] = other[source]

    def reorder(self, rows: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of the row rows[i] to row i, for all i."""
        if list(rows) == list(range(len(rows))):
            return
        order = to_device(rows, self.keys.device)
        for kept in (self.keys, self.values):
            for layer in kept:
                layer[: len(rows), :, :length] = layer[order, :, :length]
        for other in self.others:
            other[: len(rows)] = other[order]


class CachedAttention:
    """Core attention of one layer, which reads and writes the KV cache in the cache's mode.

    Args:
        attend: the layer's attention kernel, without a cache.
        number: index of the layer in the cache.

    Shapes: query [b, a, s, d], key and value [b, g, s, d] -> [b, a, s, d]; the layer's cached keys
        and values [rows, g, max_length, d].
    """

    def __init__(self, attend: Attend, cache: KVCache, number: int):
        self.attend, self.cache = attend, cache
        self.keys, self.values = cache.keys[number], cache.values[number]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, how: Weighing) -> Tensor:
        """Update the cache and return the attention output."""
        return self.cache.mode.attend(self, query, key, value, how)


class Prefill:
    """Prefill: attention over new sequences as in training, which fill the rows from `first` on.

    The padding after shorter sequences is stored too; decode steps overwrite it before any query
    attends to it.
    """

    def __init__(self, first: int):
        self.first = first

    def attend(
        self, layer: CachedAttention, query: Tensor, key: Tensor, value: Tensor, how: Weighing
    ) -> Tensor:
        """Store keys and values, and attend without the cache."""
        batch, _, length, _ = key.shape
        rows = slice(self.first, self.first + batch)
        layer.keys[rows, :, :length] = key
        layer.values[rows, :, :length] = value
        return layer.attend(query, key, value, how)


class Decode:
    """Decode step: row i attends from one new token at positions_b[i] to its cached tokens.

    Args:
        positions_b: one for each of the first rows.
        shape: range of the positions; the step reads all else from device tensors, so that it can
            be captured as a CUDA graph.
        max_length: of the cache.
        lengths: tokens of each row with its new one, if core attention is a plugin's, which then
            attends to the cache too.
    """

    def __init__(
        self,
        positions_b: Tensor,
        shape: StepShape,
        *,
        max_length: int,
        lengths: Sequence[int] = (),
    ):
        self.positions, self.shape = positions_b, shape
        self.max_length, self._lengths = max_length, lengths
        self._slots: Tensor | None = None
        self._views: dict[int, _View] = {}

    def attend(
        self, layer: CachedAttention, query: Tensor, key: Tensor, value: Tensor, how: Weighing
    ) -> Tensor:
        """Store the key and the value, and attend to all cached tokens of the row.

        Queries that share a key (grouped-query attention) are passed like positions of one
        sequence, so that keys and values need no copies.
        """
        keys, values = layer.keys, layer.values
        batch, heads, _, head_dim = query.shape
        groups = key.size(1)
        window = how.mask.window
        if window not in self._views:
            # Once for all layers with this window.
            self._views[window] = self._view(window, groups, heads, how.slopes_a, query.dtype)
        view = self._views[window]
        if self.shape.is_even:
            position = self.shape.start
            keys[:batch, :, position] = key.squeeze(2)
            values[:batch, :, position] = value.squeeze(2)
        else:
            if self._slots is None:
                self._slots = self._compute_slots(groups)
            for kept, new in ((keys, key), (values, value)):
                kept.view(-1, head_dim).index_copy_(0, self._slots, new.reshape(-1, head_dim))
        if self._lengths:
            # Row by row: such attention takes queries to be the last positions of the keys.
            return torch.cat(
                [
                    layer.attend(
                        query[i, None], keys[i, None, :, :stop], values[i, None, :, :stop], how
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

    def _compute_slots(self, groups: int) -> Tensor:
        """Return the slots of the new keys and values in the flattened cache."""
        positions_b1 = self.positions[:, None]
        rows = torch.arange(len(positions_b1) * groups, device=positions_b1.device)
        return (rows.view(-1, groups) * self.max_length + positions_b1).flatten()

    def _view(
        self, window: int, groups: int, heads: int, slopes_a: Tensor | None, dtype: torch.dtype
    ) -> "_View":
        """Return the cached positions visible with a sliding `window`, and their bias."""
        shape = self.shape
        first = max(0, shape.start - window + 1) if window else 0
        if shape.is_even and slopes_a is None:
            return _View(first, None)
        positions = self.positions[:, None, None]
        offset_b1k = torch.arange(first, shape.stop, device=positions.device) - positions
        bias = torch.zeros_like(offset_b1k, dtype=torch.float32)[:, None]
        if slopes_a is not None:
            bias = slopes_a.view(groups, heads // groups, 1) * offset_b1k[:, None]
        hidden = offset_b1k > 0
        if window:
            hidden = hidden | (offset_b1k <= -window)
        return _View(first, bias.masked_fill(hidden[:, None], -torch.inf).to(dtype))


def _attention(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, how: Weighing
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


@dataclass(frozen=True)
class _View:
    """Cached positions a decode step attends to: from `first` on, with `bias` on the scores."""

    first: int
    bias: Tensor | None
