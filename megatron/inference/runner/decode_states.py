"""States of all layers between decode steps: one row for each sequence, moved as sequences move.

When layers are built, they get their states from `DecodeStates`: `attention` for a KV cache,
`token_cache` for what is kept of each token, `state` for anything else (`megatron.model.layers.parts`
has the contract). `ModelRunner` allocates the states once its layers are built; `start` sets the pass
(see `megatron.inference.runner.passes`). The scheduler and beam search move, copy and clear rows, whatever a network
keeps in them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron.common.errors import ConfigError
from megatron.inference.runner.device import to_device
from megatron.inference.runner.kv_cache import CachedAttention, TokenCache
from megatron.inference.runner.passes import CurrentPass, Pass, Prefill
from megatron.model.layers.attention_kernels import Attend


class DecodeStates:
    """Decode states of a pipeline stage's layers, for each sequence.

    Args:
        rows: most sequences at once.
        dtype: of activations.
    """

    def __init__(self, *, rows: int, dtype: torch.dtype, device: torch.device):
        self.rows, self.dtype, self.device = rows, dtype, device
        self.capacity = 0
        self._caches: list[TokenCache] = []
        self._states: list[RowState] = []
        self._step: Pass = Prefill(0, ())

    # Called by layers in their constructors.

    def attention(self, attend: Attend, *, groups: int, head_dim: int) -> CachedAttention:
        """Return self-attention with a KV cache of a layer.

        Args:
            attend: the attention kernel of prefill.
            groups: query groups of this rank.
        """
        cache = CachedAttention(attend, self.current, groups=groups, head_dim=head_dim)
        self._caches.append(cache)
        return cache

    def token_cache(self, *, groups: int, widths: Sequence[int]) -> TokenCache:
        """Return the cache of a layer that keeps other vectors of each token than keys and values."""
        self._caches.append(TokenCache(self.current, groups=groups, widths=widths))
        return self._caches[-1]

    def state(self, *shape: int | None, dtype: torch.dtype | None = None) -> "RowState":
        """Return a state [rows, *shape] of a layer, for at most one size None."""
        sizes = self.rows, *(size or 0 for size in shape)
        tensor = torch.zeros(sizes, dtype=dtype or self.dtype, device=self.device)
        growing = shape.index(None) + 1 if None in shape else None
        self._states.append(RowState(self.current, tensor, growing=growing))
        return self._states[-1]

    @property
    def grows(self) -> bool:
        """Whether a state is as long as its longest value, so that no captured step can be replayed."""
        return any(state.grows for state in self._states)

    @property
    def by_token(self) -> bool:
        """Whether layers keep vectors of each token alone, so that any prefix of a row can be reused."""
        return not self._states

    def current(self) -> Pass:
        """Return the pass that runs."""
        return self._step

    # Called by the runner.

    def reserve(self, length: int) -> None:
        """Make room for sequences of `length` tokens in the KV caches.

        Raises:
            ConfigError: there is not enough memory.
        """
        if length <= self.capacity:
            return
        self.capacity = length
        try:
            for cache in self._caches:
                cache.reserve(self.rows, length, dtype=self.dtype, device=self.device)
        except RuntimeError as error:
            numbers = sum(cache.numbers_of_token for cache in self._caches)
            size = self.dtype.itemsize * self.rows * length * numbers / 2**30
            raise ConfigError(
                f"the KV cache of {self.rows} sequences of {length} tokens takes {size:.1f} GiB, "
                "more than there is memory: lower --micro-batch-size or --inference-max-seq-length"
            ) from error

    def start(self, step: Pass) -> None:
        """Begin a pass."""
        self._step = step

    @contextmanager
    def restore_after(self) -> Iterator[None]:
        """Undo the writes of passes in this context that further passes would not repeat."""
        before = [state.tensor.clone() for state in self._states]
        try:
            yield
        finally:
            for state, tensor in zip(self._states, before, strict=True):
                state.tensor.copy_(tensor)

    # Called by the scheduler and beam search.

    @torch.inference_mode()
    def clear(self, rows: slice, *, start: int = 0) -> None:
        """Zero these rows after NaN: masked values of the next sequences are multiplied by 0.

        Args:
            start: keep the tokens before this one; of states `by_token` only.
        """
        for cache in self._caches:
            cache.clear(rows, start)
        for state in self._states:
            state.clear(rows)

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the row `source`, a sequence of `length` tokens, to the row `target`."""
        for kept in self._all:
            kept.copy(source, target, length)

    @torch.inference_mode()
    def swap(self, row: int, other: int, length: int) -> None:
        """Exchange the first `length` tokens of two rows of caches.

        States of whole sequences are not exchanged: only states `by_token` keep ended sequences.
        """
        for cache in self._caches:
            cache.swap(row, other, length)

    @torch.inference_mode()
    def reorder(self, rows: Sequence[int], length: int) -> None:
        """Copy the row rows[i], a sequence of `length` tokens, to row i, for all i."""
        if list(rows) == list(range(len(rows))):
            return
        order = to_device(rows, self.device)
        for kept in self._all:
            kept.reorder(rows, order, length)

    @property
    def _all(self) -> "Iterator[TokenCache | RowState]":
        yield from self._caches
        yield from self._states


class RowState:
    """State of one layer for each sequence, [rows, *shape]; implements `DecodeState`.

    Args:
        current: returns the pass that runs.
        tensor: zeros.
        growing: the dimension that is as long as the longest value written; None for none.
    """

    def __init__(self, current: CurrentPass, tensor: Tensor, *, growing: int | None = None):
        self._current, self.tensor, self._growing = current, tensor, growing
        self._sizes = [0] * len(tensor)  # of each row, in the growing dimension

    @property
    def grows(self) -> bool:
        """Whether it is as long as the longest value written."""
        return self._growing is not None

    @property
    def lengths(self) -> Tensor:
        """The number of tokens of each sequence in this pass, [b] int64."""
        return self._current().lengths_on(self.tensor.device)

    def read(self) -> Tensor | None:
        """Return the states of the sequences of a decode step, [b, *shape]; None in prefill."""
        step = self._current()
        if isinstance(step, Prefill):
            return None
        kept = self.tensor[step.rows]
        if self._growing is None:
            return kept
        return kept.narrow(self._growing, 0, max(self._sizes[step.rows], default=0))

    def write(self, value: Tensor) -> None:
        """Replace the states of the sequences of this pass by `value`, [b, *shape]."""
        rows = self._current().rows
        if self._growing is None:
            self.tensor[rows] = value
            return
        size = value.size(self._growing)
        if size > self.tensor.size(self._growing):
            shape = [*self.tensor.shape]
            shape[self._growing] = size
            wider = self.tensor.new_zeros(shape)
            wider.narrow(self._growing, 0, self.tensor.size(self._growing)).copy_(self.tensor)
            self.tensor = wider
        kept = self.tensor[rows]
        kept.narrow(self._growing, 0, size).copy_(value)
        kept.narrow(self._growing, size, kept.size(self._growing) - size).zero_()
        self._sizes[rows] = [size] * len(value)

    def last(self, x: Tensor) -> Tensor:
        """Return the value at the last token of each sequence: [s, b, ...] -> [b, ...]."""
        if len(x) == 1:
            return x[0]
        return x[self.lengths - 1, torch.arange(x.size(1), device=x.device)]

    def clear(self, rows: slice) -> None:
        """Zero these rows."""
        self.tensor[rows] = 0

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy a row to another."""
        self.tensor[target] = self.tensor[source]
        self._sizes[target] = self._sizes[source]

    def reorder(self, rows: Sequence[int], order: Tensor, length: int) -> None:
        """Copy row rows[i] to row i, for all i; `order` are the same rows on the device."""
        self.tensor[: len(rows)] = self.tensor[order]
        self._sizes[: len(rows)] = [self._sizes[row] for row in rows]
