"""Attention to a block of keys, with the log-sum-exp by which blocks are merged (blockwise attention).

FlashAttention computes the blocks in which queries see all keys, or all up to their own position,
on GPUs in 16 bits. Scores of other blocks are written out, in 32 bits.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.fused_kernels.wide_products import has_wide_products

TILE = 1024
"""Queries and keys of the largest block whose scores are written out."""

_WIDEST_FLASH_HEAD = 256


class Block(NamedTuple):
    """A block of scores.

    Args:
        queries, keys: where they are in the tensors of this rank, along the sequence.
        distance: position of the first key minus the first query's.
        first_bq, stop_bq: [b or 1, sq], for each query the first key of the block that it sees and
            the one after the last; None where `sees_all`. They may lie outside of the block.
        sees_all: whether every query sees every key.
        is_causal: whether each query sees the keys up to its own position, no window or span.
    """

    queries: slice
    keys: slice
    distance: int
    first_bq: Tensor | None = None
    stop_bq: Tensor | None = None
    sees_all: bool = True
    is_causal: bool = False


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How scores become weights; see `ScoreOptions` in model/layers/attention_kernels.py.

    Args:
        flash: whether FlashAttention may compute blocks.
    """

    scale: float
    softcap: float = 0.0
    slopes_a: Tensor | None = None
    dropout: float = 0.0
    flash: bool = False

    def takes_flash(self, width: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether FlashAttention computes full and causal blocks of heads of `width` features."""
        supports = device.type == "cuda" and dtype.itemsize == 2
        supports = supports and width % 8 == 0 and width <= _WIDEST_FLASH_HEAD
        return (
            self.flash and supports and self.slopes_a is None and not (self.softcap or self.dropout)
        )

    def by_flash(self, block: Block, query: Tensor) -> bool:
        """Whether FlashAttention computes `block`."""
        is_simple = block.sees_all or block.is_causal
        return is_simple and self.takes_flash(query.size(-1), query.dtype, query.device)


def takes_flash_in_ring(name: str, *, sinks: bool) -> bool:
    """Whether FlashAttention may compute blocks of ring attention, which merges attention sinks itself.

    Args:
        name: the implementation of attention that the run has chosen.
        sinks: whether the network has them, so that it writes scores out without a ring.
    """
    return name in ("sdpa", "flash") or (name == "fused-softmax" and sinks)


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, block: Block, how: Scoring
) -> tuple[Tensor, Tensor]:
    """Attend to the keys of a block: the mixed values, and the log-sum-exp of each query's scores.

    A query that sees no key gets zeros and -inf.

    Shapes: query [b, a, sq, d], key and value [b, g, sk, d] -> [b, a, sq, d], [b, a, sq] float32.
    Randomness: draws from the stream that is current, when weights are dropped.
    Source: arXiv:2205.14135, section 3.1.
    """
    if how.by_flash(block, query):
        mixed, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, block.is_causal, scale=how.scale
        )
        return mixed, lse
    scores, _ = _scores(query, key, block, how)
    largest = scores.amax(-1, keepdim=True)
    weights = (scores - _finite(largest)).exp_()
    total = weights.sum(-1, keepdim=True)
    mixed = _product(F.dropout(weights, how.dropout), value, query.dtype)
    lse = (total.log() + largest).squeeze(-1)
    return mixed / total.masked_fill(total == 0, 1.0), lse


def block_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixed: Tensor,
    lse: Tensor,
    block: Block,
    how: Scoring,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the block's part of the gradients of query, key and value.

    Args:
        grad: of the mixed values of all blocks.
        mixed: these values.
        lse: the log-sum-exp over all blocks.

    Randomness: draws what `block_attention` has drawn, from the same state.
    Source: arXiv:2205.14135, appendix B.2.
    """
    if how.by_flash(block, query):
        return _flash_gradients(grad, query, key, value, mixed, lse, block, how)
    dtype = query.dtype
    scores, slope = _scores(query, key, block, how)
    weights = scores.sub_(_finite(lse)[..., None]).exp_()
    kept = F.dropout(torch.ones_like(weights), how.dropout) if how.dropout else None
    grad_weights = _product(grad, value.mT, dtype)
    if kept is not None:
        grad_weights = grad_weights * kept
    inner = (grad.to(lse.dtype) * mixed).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - inner)
    if slope is not None:
        grad_scores = grad_scores * slope
    grad_scores *= how.scale
    dropped = weights if kept is None else weights * kept
    return (
        _product(grad_scores, key, dtype),
        _sum_groups(grad_scores, query, key.size(1), dtype),
        _sum_groups(dropped, grad, key.size(1), dtype),
    )


def _flash_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixed: Tensor,
    lse: Tensor,
    block: Block,
    how: Scoring,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients by FlashAttention; its weights follow from the given log-sum-exp."""
    # Without dropout the state of its random numbers is not read.
    unused = torch.empty(2, dtype=torch.int64, device=query.device)
    gradients: tuple[Tensor, Tensor, Tensor]
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *(grad.to(query.dtype), query, key, value, mixed.to(query.dtype), lse.contiguous()),
        *(None, None, query.size(2), key.size(2), 0.0, block.is_causal, unused, unused),
        scale=how.scale,
    )
    return gradients


def _scores(query: Tensor, key: Tensor, block: Block, how: Scoring) -> tuple[Tensor, Tensor | None]:
    """Return the scores, -inf where masked, and the derivative of the soft cap at each of them."""
    scores = _product(query, key.mT, query.dtype)
    scores *= how.scale
    slope = None
    if how.softcap:
        bent = (scores / how.softcap).tanh()
        scores, slope = how.softcap * bent, 1 - bent * bent
    keys_k = torch.arange(key.size(2), device=query.device)
    if how.slopes_a is not None:
        queries_q1 = torch.arange(query.size(2), device=query.device)[:, None]
        scores += how.slopes_a[:, None, None] * (keys_k - queries_q1 + block.distance)
    if block.first_bq is not None and block.stop_bq is not None:
        seen = (block.first_bq[..., None] <= keys_k) & (keys_k < block.stop_bq[..., None])
        scores.masked_fill_(~seen[:, None], -torch.inf)
    return scores, slope


def _product(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply each head's matrices with its group's, accumulating in 32 bits at least.

    Args:
        dtype: in which GPUs read them.

    Shapes: x [b, a, m, k], y [b, g, k, n] -> [b, a, m, n].
    """
    heads, groups, rows = x.size(1), y.size(1), x.size(2)
    x = x.unflatten(1, (groups, -1)).flatten(2, 3)
    return _wide_product(x, y, dtype).unflatten(2, (-1, rows)).reshape(x.size(0), heads, rows, -1)


def _sum_groups(x: Tensor, y: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Multiply the transposed matrices of each head, and add up the heads of each group.

    Shapes: x [b, a, m, k], y [b, a, m, n] -> [b, g, k, n].
    """
    x, y = (each.unflatten(1, (groups, -1)).flatten(2, 3) for each in (x, y))
    return _wide_product(x.mT, y, dtype)


def _wide_product(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    if y.is_cuda and dtype.itemsize == 2 and has_wide_products(y.device, dtype):
        x, y = x.to(dtype), y.to(dtype)
        product = torch.bmm(x.flatten(0, 1), y.flatten(0, 1), out_dtype=torch.float32)
        return product.unflatten(0, x.shape[:2])
    wide = torch.promote_types(dtype, torch.float32)
    return x.to(wide) @ y.to(wide)


def _finite(x: Tensor) -> Tensor:
    """Return `x` with 0 for -inf, the value of queries that see nothing."""
    return x.masked_fill(x == -torch.inf, 0.0)
