"""KV cache: stores the keys and values of a layer, and attends to them in prefill and decode.

`TokenCache` is what a layer keeps of each token, `CachedAttention` with keys and values the core attention
of a layer in generation. What they do depends on the pass (`megatron.inference.runner.passes`): `Prefill`
stores the tokens of prompts, `Extend` and `Decode` attend from new tokens to the cached ones too.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.inference.runner.passes import CachedPass, CurrentPass, Decode, with_bias
from megatron.model.layers.attention_kernels import Attend, ScoreOptions, append_sinks, soft_capped


class TokenCache:
    """What one layer keeps of each token: preallocated tensors, one row for each sequence.

    Args:
        current: returns the pass that runs, which says where tokens are stored.
        groups: vectors of each token in each tensor, such as the key heads of this rank.
        widths: features of these vectors, for each tensor.

    Shapes: tensors [rows, groups, capacity, width].
    """

    def __init__(self, current: CurrentPass, *, groups: int, widths: Sequence[int]):
        self._current, self._groups, self._widths = current, groups, tuple(widths)
        self.kept = [torch.empty(0) for _ in widths]

    @property
    def attends_to_cache(self) -> bool:
        """Whether queries of this pass attend to cached tokens; else layers compute as in training."""
        return isinstance(self._current(), CachedPass)

    @property
    def numbers_of_token(self) -> int:
        """Number of cached elements per token."""
        return self._groups * sum(self._widths)

    def store(self, *new: Tensor) -> None:
        """Store the tokens of this pass, [b, groups, s, width] for each tensor."""
        self._current().store(self.kept, new)

    def attend(self, query: Tensor, how: ScoreOptions, *, value_width: int | None = None) -> Tensor:
        """Attend from the new tokens of each sequence to its cached tokens, the new ones among them.

        Queries that share a key (grouped-query attention) are passed like positions of one sequence,
        so that keys and values need no copies. Keys are the first tensor, values the last one.

        Args:
            value_width: features of a value, the first of the tensor (default: all).

        Shapes: query [b, a, s, width of keys], groups divides a -> [b, a, s, value_width].
        """
        step = self._current()
        if not isinstance(step, CachedPass):
            raise TypeError("a prefill pass attends to no cached tokens")
        batch, heads, length, width = query.shape
        view = step.view(self._groups, heads, how, query.dtype)
        visible = slice(view.positions.start, view.positions.stop)
        output = _attention(
            query.reshape(batch, self._groups, heads // self._groups * length, width),
            self.kept[0][step.rows, :, visible],
            self.kept[-1][step.rows, :, visible, :value_width],
            view.bias,
            how,
        )
        return output.reshape(batch, heads, length, -1)

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

    def clear(self, rows: slice, start: int = 0) -> None:
        """Zero these rows from the token `start` on."""
        for kept in self.kept:
            kept[rows, :, start:] = 0

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a row to another."""
        for kept in self.kept:
            kept[target, :, :length] = kept[source, :, :length]

    def swap(self, row: int, other: int, length: int) -> None:
        """Exchange the first `length` tokens of two rows."""
        for kept in self.kept:
            kept[[row, other], :, :length] = kept[[other, row], :, :length]

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

    def __init__(self, kernel: Attend, current: CurrentPass, *, groups: int, head_dim: int):
        super().__init__(current, groups=groups, widths=(head_dim, head_dim))
        self._kernel = kernel

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, how: ScoreOptions) -> Tensor:
        """Update the cache and return the attention output."""
        step = self._current()
        kernel = how.kernels.decode_attention
        if kernel and isinstance(step, Decode) and not step.spans and how.relative is None:
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
        if not isinstance(step, CachedPass):
            return self._kernel(query, key, value, with_bias(how, query.size(2), key.size(2)))
        return self._attend_by_row(step, query, how) if step.spans else self.attend(query, how)

    def _attend_by_row(self, step: CachedPass, query: Tensor, how: ScoreOptions) -> Tensor:
        """Attend by the kernel, which takes queries to be the last positions of the keys."""
        mixed = query.new_zeros(query.shape)
        for i, (new, stop) in enumerate(step.spans):
            keys, values = (kept[step.rows.start + i, None, :, :stop] for kept in self.kept)
            mixed[i, :, :new] = self._kernel(
                query[i, None, :, :new], keys, values, with_bias(how, new, stop)
            )[0]
        return mixed


def _attention(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, how: ScoreOptions
) -> Tensor:
    """Return softmax(scores + bias) @ values; with attention sinks, of the softmax beside them."""
    if not how.softcap and how.sinks_a is None:
        return F.scaled_dot_product_attention(query, keys, values, bias, scale=how.scale)
    scores = soft_capped((query * how.scale) @ keys.mT, how.softcap)
    scores = scores if bias is None else scores + bias
    if how.sinks_a is not None:
        by_head = scores.reshape(len(scores), len(how.sinks_a), -1, scores.size(3))
        scores = append_sinks(by_head, how.sinks_a).view(*scores.shape[:3], -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return weights[..., : keys.size(2)].to(scores.dtype) @ values
