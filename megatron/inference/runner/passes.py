"""Passes of generation: prefill of new sequences, extension of cached ones, decode steps of one token.

A pass says in which rows of the caches its tokens are stored, and which cached tokens its queries see.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.inference.runner.decode_graphs import StepShape
from megatron.inference.runner.device import to_device
from megatron.model.layers.attention_kernels import ScoreOptions


class Pass(ABC):
    """A pass of generation over some rows of the caches."""

    rows: slice

    @abstractmethod
    def lengths_on(self, device: torch.device) -> Tensor:
        """Return the number of tokens of each sequence in this pass, [b] int64."""

    @abstractmethod
    def store(self, kept: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        """Store the tokens of this pass, [b, groups, s, width], in the tensors of a cache."""


class Prefill(Pass):
    """Prefill: attention over new sequences as in training, which fill the rows from `first` on.

    The padding after shorter sequences is stored too; later passes overwrite it before any query
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


@dataclass(frozen=True)
class View:
    """Cached positions that queries attend to, with `bias` on the scores."""

    positions: range
    bias: Tensor | None


class CachedPass(Pass):
    """A pass whose queries attend to cached tokens, each up to its own position.

    Args:
        positions_bs: of the queries.
        spans: new tokens of each row, and its tokens with them, if core attention runs row by row.
    """

    def __init__(self, positions_bs: Tensor, spans: Sequence[tuple[int, int]]):
        self.positions_bs, self.spans = positions_bs, spans
        self._views: dict[tuple[int, int, int], View] = {}

    @abstractmethod
    def visible(self, window: int) -> range:
        """Return positions that include all that a row sees with a sliding `window`; 0 for none."""

    def view(self, groups: int, heads: int, how: ScoreOptions, dtype: torch.dtype) -> View:
        """Return the cached positions that `heads` in `groups` see, and their bias."""
        layers = how.mask.window, groups, heads
        if layers not in self._views:
            # Once for all layers that are alike.
            self._views[layers] = self.build_view(*layers, how, dtype)
        return self._views[layers]

    def build_view(
        self, window: int, groups: int, heads: int, how: ScoreOptions, dtype: torch.dtype
    ) -> View:
        """Return the cached positions visible with a sliding `window`, and their bias.

        Shapes: bias [b, g or 1, q * s, k], or [b, g or 1, q or 1, k] for one position, with q
            queries in each of g groups.
        """
        visible, queries = self.visible(window), heads // groups
        keys_k = torch.arange(visible.start, visible.stop, device=self.positions_bs.device)
        offset_bsk = keys_k - self.positions_bs[..., None]
        bias = torch.zeros_like(offset_bsk, dtype=torch.float32)[:, None, None]
        if how.slopes_a is not None:
            bias = how.slopes_a.view(groups, queries, 1, 1) * offset_bsk[:, None, None]
        if how.relative is not None:
            by_head = how.relative.at(offset_bsk).permute(0, 3, 1, 2)
            bias = bias + by_head.unflatten(1, (groups, queries))
        hidden = offset_bsk > 0
        if window:
            hidden = hidden | (offset_bsk <= -window)
        bias = bias.masked_fill(hidden[:, None, None], -torch.inf).to(dtype)
        if bias.size(3) > 1:
            bias = bias.expand(-1, -1, queries, -1, -1)
        return View(visible, bias.flatten(2, 3))


class Extend(CachedPass):
    """Extension: new tokens of each row attend to its cached tokens and to each other, causally.

    The padding after the new tokens of shorter rows is not stored.

    Args:
        first: row of the first sequence.
        starts: cached tokens of each row.
        positions_bs: of the new tokens and the padding.
        lengths: new tokens of each row.
        by_row: whether core attention runs row by row, as in training; else over all rows at once.
    """

    def __init__(
        self,
        first: int,
        starts: Sequence[int],
        lengths: Sequence[int],
        positions_bs: Tensor,
        *,
        by_row: bool,
    ):
        spans = [(new, start + new) for start, new in zip(starts, lengths, strict=True)]
        super().__init__(positions_bs, spans if by_row else ())
        self.rows = slice(first, first + len(starts))
        self._lengths, self._starts = lengths, starts
        self._stop = max(stop for _, stop in spans)
        stored = [(row, i) for row, new in enumerate(lengths) for i in range(new)]
        self._sequences_t, self._new_t = to_device(stored, positions_bs.device).unbind(1)

    def lengths_on(self, device: torch.device) -> Tensor:
        """Return the number of new tokens of each sequence, [b] int64."""
        return to_device(self._lengths, device)

    def store(self, kept: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        """Store the new tokens in the tensors of a cache, behind those that are cached."""
        positions_t = self.positions_bs[self._sequences_t, self._new_t]
        rows_t = self._sequences_t + self.rows.start
        for cache, tokens in zip(kept, new, strict=True):
            cache[rows_t, :, positions_t] = tokens[self._sequences_t, :, self._new_t]

    def visible(self, window: int) -> range:
        """Return positions that include all that a row sees with a sliding `window`; 0 for none."""
        return range(max(0, min(self._starts) - window + 1) if window else 0, self._stop)


class Decode(CachedPass):
    """Decode step: row i attends from one new token at positions_b[i] to its cached tokens.

    Args:
        positions_b: one for each of the first rows.
        shape: range of the positions; the step reads all else from device tensors, so that it can
            be captured as a CUDA graph.
        lengths: tokens of each row with its new one, if core attention is a plugin's, which then
            attends to the cache too.
    """

    def __init__(self, positions_b: Tensor, shape: StepShape, *, lengths: Sequence[int] = ()):
        super().__init__(positions_b[:, None], [(1, length) for length in lengths])
        self.rows = slice(0, len(positions_b))
        self.positions, self.shape = positions_b, shape
        self._slots: dict[tuple[int, int], Tensor] = {}

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

    def build_view(
        self, window: int, groups: int, heads: int, how: ScoreOptions, dtype: torch.dtype
    ) -> View:
        """Return the cached positions visible with a sliding `window`, and their bias."""
        if self.shape.is_even and how.slopes_a is None and how.relative is None:
            return View(self.visible(window), None)
        return super().build_view(window, groups, heads, how, dtype)

    def _slots_of(self, groups: int, capacity: int) -> Tensor:
        """Return the slots of the new keys and values in the flattened caches of these sizes."""
        sizes = groups, capacity
        if sizes not in self._slots:
            rows = torch.arange(len(self.positions_bs) * groups, device=self.positions_bs.device)
            self._slots[sizes] = (rows.view(-1, groups) * capacity + self.positions_bs).flatten()
        return self._slots[sizes]


def with_bias(how: ScoreOptions, sq: int, sk: int) -> ScoreOptions:
    """Return `how` with the bias of relative positions, for attention without a cache."""
    return replace(how, bias=how.relative.bias(sq, sk), relative=None) if how.relative else how


CurrentPass = Callable[[], Pass]
"""Returns the pass that runs."""
