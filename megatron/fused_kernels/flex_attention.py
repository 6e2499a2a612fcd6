"""FlexAttention of PyTorch: attention kernels for packed documents, prefixes, windows and biases.

Masks are block masks: blocks of scores that no query sees are skipped, and only the blocks at the
edge of what a query sees compare positions. Neither masks nor biases of s x s are written to memory.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.fused_kernels.compilation import compile_function

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Queries and keys of a block."""

_VARIANTS = 64
"""How often it may be compiled; PyTorch's 8 are few for two stacks: encoder, decoder and cross-attention, each
in training and evaluation, and in lengths that differ."""


def block_mask(first_bq: Tensor, stop_bq: Tensor, keys: int, *, samples: int) -> "BlockMask":
    """Build the block mask of queries that see the keys from `first_bq` up to `stop_bq`.

    The work is in proportion to queries times blocks of keys, has static shapes, and needs no
    synchronisation with the host.

    Args:
        keys: number of keys.
        samples: of the batch, when all samples share one mask.

    Shapes: first_bq and stop_bq [b or 1, sq].
    """
    from torch.nn.attention.flex_attention import BlockMask

    queries = first_bq.size(1)
    starts = torch.arange(0, keys, BLOCK, device=first_bq.device)
    first_bq1, stop_bq1 = first_bq[..., None], stop_bq[..., None]
    touched = torch.maximum(first_bq1, starts) < torch.minimum(stop_bq1, starts + BLOCK)
    covered = (first_bq1 <= starts) & (starts + BLOCK <= stop_bq1)
    seen, full = _in_blocks(touched).any(2), _in_blocks(covered).all(2)
    first_bq, stop_bq = (x.expand(samples, queries).int() for x in (first_bq, stop_bq))

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (first_bq[b, q] <= k) & (k < stop_bq[b, q])

    return BlockMask.from_kv_blocks(
        *_order_blocks(seen & ~full),
        *_order_blocks(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(queries, keys),
    )


def _in_blocks(x_bqn: Tensor) -> Tensor:
    """Divide queries into blocks, padded with False: [b, sq, n] -> [b, blocks, BLOCK, n]."""
    padding = -x_bqn.size(1) % BLOCK
    return F.pad(x_bqn, (0, 0, 0, padding)).unflatten(1, (-1, BLOCK))


def _order_blocks(blocks_bqn: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of keys are set for each block of queries, and which, these first."""
    blocks = blocks_bqn[:, None].int()
    order = blocks.argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.int()


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    blocks: "BlockMask | None",
    scale: float,
    softcap: float,
    slopes_a: Tensor | None,
    bias_ad: Tensor | None,
    sinks_a: Tensor | None,
) -> Tensor:
    """Compute attention; arguments as in `model/layers/attention_kernels.py`.

    Compiled by inductor on GPUs; on CPUs PyTorch computes it uncompiled, with all scores in memory.

    Args:
        blocks: which keys the queries see; None for all.
        bias_ad: biases by distance, of the keys -(sk - 1) to sq - 1 after the query.
        sinks_a: attention sinks: softmax with a sink is softmax times sigmoid(lse - sink), lse the
            log-sum-exp of the scores.

    Shapes: query [b, a, sq, d], key and value [b, g, sk, d], slopes_a and sinks_a [a], bias_ad
        [a, sq + sk - 1] -> [b, a, sq, d].
    Source: arXiv:2412.05496; https://pytorch.org/docs/stable/nn.attention.flex_attention.html.
    """
    from torch.nn.attention import flex_attention as torch_flex

    compiles = query.device.type == "cuda" and not torch.compiler.is_compiling()
    attend: Any = _compile() if compiles else torch_flex.flex_attention
    result = attend(
        query,
        key,
        value,
        score_mod=_score_mod(query, key, softcap=softcap, slopes_a=slopes_a, bias_ad=bias_ad),
        block_mask=blocks,
        scale=scale,
        enable_gqa=query.size(1) != key.size(1),
        return_aux=None if sinks_a is None else torch_flex.AuxRequest(lse=True),
    )
    if sinks_a is None:
        mixed: Tensor = result
        return mixed
    mixed, aux = result
    share = (aux.lse - sinks_a.to(aux.lse.dtype)[:, None]).sigmoid()
    return mixed * share[..., None].to(mixed.dtype)


def compile_obstacle(
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    value_dim: int | None = None,
    has_sinks: bool = False,
) -> str | None:
    """Return why FlexAttention cannot be compiled on this GPU, by this PyTorch; None if it can.

    Compiles a call of one block, forward and backward, apart from the calls of layers.

    Args:
        value_dim: features of values, if they are narrower than queries and keys.
        has_sinks: whether attention has sinks, and so needs the log-sum-exp.
    """
    x = torch.ones(1, 1, BLOCK, head_dim, dtype=dtype, device=device, requires_grad=True)

    def attend(x: Tensor) -> Any:
        from torch.nn.attention import flex_attention as torch_flex

        result: Any = torch_flex.flex_attention(
            x,
            x,
            x[..., :value_dim],
            score_mod=modified,
            block_mask=blocks,
            return_aux=torch_flex.AuxRequest(lse=True) if has_sinks else None,
        )
        return result[0] + result[1].lse[..., None] if has_sinks else result

    try:
        last_bq = torch.arange(BLOCK, device=device)[None]
        blocks = block_mask(torch.zeros_like(last_bq), last_bq + 1, BLOCK, samples=1)
        slopes_a = torch.ones(1, device=device)
        modified = _score_mod(x, x, softcap=1.0, slopes_a=slopes_a, bias_ad=None)
        compile_function(attend, variants=1, fullgraph=True)(x).sum().backward()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever PyTorch, its compilers or the driver raise
        reason = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
        return f"torch {torch.__version__} cannot compile it: {reason}"
    return None


@cache
def _compile() -> Callable[..., Any]:
    """Compile FlexAttention; a second length of samples compiles it again, for every length."""
    from torch.nn.attention import flex_attention as torch_flex

    return compile_function(torch_flex.flex_attention, variants=_VARIANTS, fullgraph=True)


def _score_mod(
    query: Tensor,
    key: Tensor,
    *,
    softcap: float,
    slopes_a: Tensor | None,
    bias_ad: Tensor | None,
) -> Callable[..., Tensor] | None:
    """Compose the function that caps and biases a score; None for no change.

    Numbers are captured as tensors: a changed Python number would recompile the kernel.
    """
    device = query.device
    steps: list[Callable[..., Tensor]] = []
    if softcap:
        cap = torch.full((), softcap, device=device)
        steps.append(lambda score, b, h, q, k: cap * (score / cap).tanh())
    if slopes_a is not None:
        behind = torch.full((), key.size(2) - query.size(2), dtype=torch.int32, device=device)
        steps.append(lambda score, b, h, q, k: score + slopes_a[h] * (k - q - behind))
    if bias_ad is not None:
        nearest = torch.full((), query.size(2) - 1, dtype=torch.int32, device=device)
        steps.append(lambda score, b, h, q, k: score + bias_ad[h, k - q + nearest])

    def modified(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        for step in steps:
            score = step(score, b, h, q, k)
        return score

    return modified if steps else None
