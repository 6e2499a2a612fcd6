"""Triton kernels of the softmax over attention scores: one program, one row."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.fused_kernels.reference import softmax as reference
from megatron.fused_kernels.triton.launch import warps
from megatron.fused_kernels.triton.limits import softmax_limit


@triton.jit
def _forward(
    scores,
    mask,
    out,
    scale,
    sq,
    sk,
    heads,
    mask_b,
    mask_a,
    mask_q,
    mask_k,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    query, head, sample = row % sq, row // sq % heads, row // sq // heads
    keys = tl.arange(0, BLOCK)
    seen = keys < sk
    loaded = seen
    if CAUSAL:
        last = query + sk - sq
        seen = seen & (keys <= last)
        # Whole groups of 16 keys, so that loads are vectors.
        loaded = loaded & (keys < (last // 16 + 1) * 16)
    if MASKED:
        start = mask + sample * mask_b + head * mask_a + query * mask_q
        seen = seen & (tl.load(start + keys * mask_k, mask=keys < sk, other=0) != 0)
    x = tl.load(scores + row * sk + keys, mask=loaded, other=0.0).to(tl.float32) * scale
    x = tl.where(seen, x, -float("inf"))
    largest = tl.max(x, 0)
    # A row without any key: -inf - -inf is NaN, 0 / 1 is 0.
    exp = tl.where(seen, tl.exp(x - tl.where(largest == -float("inf"), 0.0, largest)), 0.0)
    total = tl.sum(exp, 0)
    result = exp / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * sk + keys, result, mask=keys < sk)


@triton.jit
def _backward(weights, grad_out, grad, scale, sk, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    keys = tl.arange(0, BLOCK)
    here = keys < sk
    y = tl.load(weights + row * sk + keys, mask=here, other=0.0).to(tl.float32)
    dy = tl.load(grad_out + row * sk + keys, mask=here, other=0.0).to(tl.float32)
    dx = scale * y * (dy - tl.sum(y * dy, 0))
    tl.store(grad + row * sk + keys, dx, mask=here)


class _ScaledSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, mask: Tensor | None, scale: float, causal: bool
    ) -> Tensor:
        _, heads, sq, sk = scores.shape
        out, block = torch.empty_like(scores), triton.next_power_of_2(sk)
        seen = scores if mask is None else mask.view(torch.uint8).expand_as(scores)
        _forward[(scores.numel() // sk,)](
            scores,
            seen,
            out,
            scale,
            sq,
            sk,
            heads,
            *seen.stride(),
            CAUSAL=causal,
            MASKED=mask is not None,
            BLOCK=block,
            num_warps=warps(block),
        )
        ctx.scale = scale
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (weights,) = ctx.saved_tensors
        grad_out = grads[0].contiguous()
        sk = weights.size(-1)
        grad, block = torch.empty_like(weights), triton.next_power_of_2(sk)
        _backward[(weights.numel() // sk,)](
            weights, grad_out, grad, ctx.scale, sk, BLOCK=block, num_warps=warps(block)
        )
        return grad, None, None, None


def scaled_causal_softmax(scores: Tensor, scale: float) -> Tensor:
    """Compute the result of the reference in 32 bits."""
    if softmax_limit(scores.dtype, scores.size(-1)):
        return reference.scaled_causal_softmax(scores, scale)
    return _ScaledSoftmax.apply(scores.contiguous(), None, scale, True)


def scaled_masked_softmax(scores: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Compute the result of the reference in 32 bits."""
    if softmax_limit(scores.dtype, scores.size(-1)):
        return reference.scaled_masked_softmax(scores, mask, scale)
    return _ScaledSoftmax.apply(scores.contiguous(), mask, scale, False)
