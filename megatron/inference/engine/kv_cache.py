"""KV cache: stores the keys and values of a layer, and attends to them in prefill and decode.

`TokenCache` is what a layer keeps of each token, `CachedAttention` with keys and values the core attention
of a layer in generation. What they do depends on the pass: `Prefill` stores the tokens of prompts,
`Decode` attends from one new token of each sequence to the cached ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.inference.engine.decode_graphs import StepShape
from megatron.inference.engine.device import to_device
from megatron.model.layers.attention_kernels import Attend, ScoreOptions, append_sinks, soft_capped


class TokenCache:
    """What one layer keeps of each token: preallocated tensors, one row for each sequence.

    Args:
        current: returns the pass that runs, which says where tokens are stored.
        groups: vectors of each token in each tensor, such as the key heads of this rank.
        widths: features of these vectors, for each tensor.

    Shapes: tensors [rows, groups, capacity, width].
    """

    def __init__(self, current: "CurrentStep", *, groups: int, widths: Sequence[int]):
        self._current, self._groups, self._widths = current, groups, tuple(widths)
        self.kept = [torch.empty(0) for _ in widths]

    @property
    def is_decode(self) -> bool:
        """Whether this pass is a decode step."""
        return isinstance(self._current(), Decode)

    @property
    def numbers_of_token(self) -> int:
        """How many numbers are cached of each token."""
        return self._groups * sum(self._widths)

    def store(self, *new: Tensor) -> None:
        """Store the tokens of this pass, [b, groups, s, width] for each tensor."""
        self._current().store(self.kept, new)

    def attend(self, query: Tensor, how: ScoreOptions, *, value_width: int | None = None) -> Tensor:
        """Attend from the new token of each sequence to its cached tokens, in a decode step.

        Queries that share a key (grouped-query attention) are passed like positions of one sequence,
        so that keys and values need no copies. Keys are the first tensor, values the last one.

        Args:
            value_width: features of a value, the first of the tensor (default: all).

        Shapes: query [b, a, 1, width of keys], groups divides a -> [b, a, 1, value_width].
        """
        step = self._current()
        if not isinstance(step, Decode):
            raise TypeError("cached tokens are attended to in decode steps")
        batch, heads, _, width = query.shape
        view = step.view(self._groups, heads, how, query.dtype)
        visible = slice(view.positions.start, view.positions.stop)
        output = _attention(
            query.view(batch, self._groups, heads // self._groups, width),
            self.kept[0][:batch, :, visible],
            self.kept[-1][:batch, :, visible, :value_width],
            view.bias,
            how,
        )
        return output.reshape(batch, heads, 1, -1)

    def reserve(self, rows: int, length: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate room for sequences of `length` tokens, with the tokens so far."""
        before = self.kept
        # Zeros: masked values are multiplied by 0, and 0 * NaN would be NaN.
        self.kept = [
            torch.zeros(rows, self._groups, length, width, dtype=dtype, device=device)
            for width in self._widths
        ]
        for kept, old in zip(self.kept, before, strict=True):
            if old.numel():
                kept[:, :, : old.size(2)] = old

    def clear(self, rows: slice) -> None:
        """Zero these rows."""
        for kept in self.kept:
            kept[rows] = 0

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a row to another."""
        for kept in self.kept:
            kept[target, :, :length] = kept[source, :, :length]

    def reorder(self, rows: Sequence[int], order: Tensor, length: int) -> None:
        """Copy the first `length` tokens of row rows[i] to row i; `order` are the rows on the device."""
        for kept in self.kept:
            kept[: len(rows), :, :length] = kept[order, :, :length]


class CachedAttention(TokenCache):
    """Core attention of one layer in generation, which caches keys and values.

    Args:
        kernel: the layer's attention kernel, without a cache: computes prefill.
        current: returns the pass that runs.
        groups: query groups of this rank.
        head_dim: features of a head.

    Shapes: query [b, a, s, d], key and value [b, g, s, d] -> [b, a, s, d].
    """

    def __init__(self, kernel: Attend, current: "CurrentStep", *, groups: int, head_dim: int):
        super().__init__(current, groups=groups, widths=(head_dim, head_dim))
        self._kernel = kernel

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, how: ScoreOptions) -> Tensor:
        """Update the cache and return the attention output."""
        step = self._current()
        kernel = how.kernels.decode_attention
        if kernel and isinstance(step, Decode) and not step.lengths and how.relative is None:
            return kernel(
                query,
                key,
                value,
                (self.kept[0], self.kept[1]),
                step.positions,
                step.visible(how.mask.window),
                window=how.mask.window,
                scale=how.scale,
                softcap=how.softcap,
                slopes_a=how.slopes_a,
                sinks_a=how.sinks_a,
            )
        self.store(key, value)
        if isinstance(step, Prefill):
            return self._kernel(query, key, value, _with_bias(how, query.size(2), key.size(2)))
        if not step.lengths:
            return self.attend(query, how)
        # Row by row: a plugin's attention takes queries to be the last positions of the keys.
        keys, values = self.kept
        return torch.cat(
            [
                self._kernel(
                    query[i, None],
                    keys[i, None, :, :stop],
                    values[i, None, :, :stop],
                    _with_bias(how, 1, stop),
                )
                for i, stop in enumerate(step.lengths)
            ]
        )


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

    def store(self, kept: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        """Store the tokens of new sequences in the tensors of a cache."""
        for cache, tokens in zip(kept, new, strict=True):
            cache[self.rows, :, : tokens.size(2)] = tokens


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
        self.lengths = lengths
        self._slots: dict[tuple[int, int], Tensor] = {}
        self._views: dict[tuple[int, int, int], _View] = {}

    def lengths_on(self, device: torch.device) -> Tensor:
        """Return the number of tokens of each sequence in this pass, [b] int64."""
        return torch.ones_like(self.positions)

    def store(self, kept: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        """Store the new token of each row in the tensors of a cache."""
        for cache, tokens in zip(kept, new, strict=True):
            batch, groups, _, width = tokens.shape
            if self.shape.is_even:
                cache[:batch, :, self.shape.start] = tokens.squeeze(2)
            else:
                slots = self._slots_of(groups, cache.size(2))
                cache.view(-1, width).index_copy_(0, slots, tokens.reshape(-1, width))

    def visible(self, window: int) -> range:
        """Return positions that include all that a row sees with a sliding `window`; 0 for none."""
        return range(max(0, self.shape.start - window + 1) if window else 0, self.shape.stop)

    def view(self, groups: int, heads: int, how: ScoreOptions, dtype: torch.dtype) -> "_View":
        """Return the cached positions that `heads` in `groups` see, and their bias."""
        layers = how.mask.window, groups, heads
        if layers not in self._views:
            # Once for all layers that are alike.
            self._views[layers] = self._view(*layers, how, dtype)
        return self._views[layers]

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
        visible = self.visible(window)
        if shape.is_even and slopes_a is None and how.relative is None:
            return _View(visible, None)
        positions = self.positions[:, None, None]
        offset_b1k = torch.arange(visible.start, visible.stop, device=positions.device) - positions
        bias = torch.zeros_like(offset_b1k, dtype=torch.float32)[:, None]
        if slopes_a is not None:
            bias = slopes_a.view(groups, heads // groups, 1) * offset_b1k[:, None]
        if how.relative is not None:
            by_head = how.relative.at(offset_b1k[:, 0]).transpose(1, 2)
            bias = bias + by_head.unflatten(1, (groups, heads // groups))
        hidden = offset_b1k > 0
        if window:
            hidden = hidden | (offset_b1k <= -window)
        return _View(visible, bias.masked_fill(hidden[:, None], -torch.inf).to(dtype))


def _with_bias(how: ScoreOptions, sq: int, sk: int) -> ScoreOptions:
    """Return `how` with the bias of relative positions, for attention without a cache."""
    return replace(how, bias=how.relative.bias(sq, sk), relative=None) if how.relative else how


def _attention(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, how: ScoreOptions
) -> Tensor:
    """Return softmax(scores + bias) @ values; with attention sinks, of the softmax beside them."""
    if not how.softcap and how.sinks_a is None:
        return F.scaled_dot_product_attention(query, keys, values, bias, scale=how.scale)
    scores = soft_capped((query * how.scale) @ keys.mT, how.softcap)
    scores = scores if bias is None else scores + bias
    if how.sinks_a is not None:
        by_group = append_sinks(scores.flatten(1, 2)[:, :, None], how.sinks_a)
        scores = by_group.view(*scores.shape[:3], -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return weights[..., : keys.size(2)].to(scores.dtype) @ values


CurrentStep = Callable[[], Prefill | Decode]
"""Returns the pass that runs."""


@dataclass(frozen=True)
class _View:
    """Cached positions that a decode step attends to, with `bias` on the scores."""

    positions: range
    bias: Tensor | None
