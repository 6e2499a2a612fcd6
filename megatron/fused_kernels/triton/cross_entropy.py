"""Triton kernels of the cross-entropy over one rank's slice of the vocabulary; one program per token.

The first `real` of the columns of a row take part; the rest is padding.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.fused_kernels.reference import cross_entropy as reference
from megatron.fused_kernels.reference.cross_entropy import CrossEntropy
from megatron.fused_kernels.triton.launch import warps
from megatron.fused_kernels.triton.limits import dtype_limit

_LARGEST_BLOCK = 4096  # columns at a time; the vocabulary itself may have any size


@triton.jit
def _load(row, column, columns, real):
    """Return logits in 32 bits, -inf for padding.

    Masked by `columns`, which is even: a load masked by `real` could not read vectors.
    """
    x = tl.load(row + column, mask=column < columns, other=-float("inf")).to(tl.float32)
    return tl.where(column < real, x, -float("inf"))


@triton.jit
def _largest(logits, out, columns, real, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, real, BLOCK):
        x = _load(logits + row * columns, start + tl.arange(0, BLOCK), columns, real)
        best = tl.maximum(best, x)
    tl.store(out + row, tl.max(best, 0))


@triton.jit
def _sums(logits, largest, target, totals, own, columns, real, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    shift = tl.load(largest + row)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, real, BLOCK):
        x = _load(logits + row * columns, start + tl.arange(0, BLOCK), columns, real)
        total += tl.exp(x - shift)
    tl.store(totals + row, tl.sum(total, 0))
    wanted = tl.load(target + row)
    x = tl.load(logits + row * columns + tl.maximum(wanted, 0)).to(tl.float32)
    tl.store(own + row, tl.where(wanted >= 0, x - shift, 0.0))


@triton.jit
def _log_total(logits, out, columns, real, BLOCK: tl.constexpr):
    """Online softmax: maximum and sum in one pass, rescaling the sum at each new maximum."""
    row = tl.program_id(0).to(tl.int64)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, real, BLOCK):
        x = _load(logits + row * columns, start + tl.arange(0, BLOCK), columns, real)
        better = tl.maximum(best, x)
        # If all logits so far are -inf, -inf - -inf would be NaN.
        base = tl.where(better == -float("inf"), 0.0, better)
        total = total * tl.exp(best - base) + tl.exp(x - base)
        best = better
    largest = tl.max(best, 0)
    tl.store(out + row, largest + tl.log(tl.sum(total * tl.exp(best - largest), 0)))


@triton.jit
def _gradient(logits, log_totals, target, grads, columns, real, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    log_total = tl.load(log_totals + row)
    wanted = tl.load(target + row)
    grad = tl.load(grads + row)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = _load(logits + row * columns, column, columns, real)
        value = (tl.exp(x - log_total) - tl.where(column == wanted, 1.0, 0.0)) * grad
        tl.store(logits + row * columns + column, value, mask=column < columns)


def _block(columns: int) -> dict[str, int]:
    block = min(_LARGEST_BLOCK, triton.next_power_of_2(columns))
    return {"BLOCK": block, "num_warps": warps(block)}


def _per_token(logits_nv: Tensor) -> Tensor:
    return torch.empty(len(logits_nv), dtype=torch.float32, device=logits_nv.device)


def largest(logits_nv: Tensor, real: int) -> Tensor:
    """Return the greatest logit of every token."""
    if dtype_limit(logits_nv.dtype):
        return reference.largest(logits_nv, real)
    logits_nv, out = logits_nv.contiguous(), _per_token(logits_nv)
    columns = logits_nv.size(1)
    _largest[(len(out),)](logits_nv, out, columns, real, **_block(columns))
    return out


def sums(
    logits_nv: Tensor, largest_n: Tensor, target_n: Tensor, real: int
) -> tuple[Tensor, Tensor]:
    """Return the sum of exp(logit - largest), and the target's logit - largest or 0."""
    if dtype_limit(logits_nv.dtype):
        return reference.sums(logits_nv, largest_n, target_n, real)
    logits_nv, columns = logits_nv.contiguous(), logits_nv.size(1)
    totals, own = _per_token(logits_nv), _per_token(logits_nv)
    _sums[(len(totals),)](
        logits_nv, largest_n, target_n.contiguous(), totals, own, columns, real, **_block(columns)
    )
    return totals, own


def gradient(
    logits_nv: Tensor, log_total_n: Tensor, target_n: Tensor, grad_n: Tensor, real: int
) -> Tensor:
    """Write (softmax - one at the target) * grad over the logits."""
    if dtype_limit(logits_nv.dtype):
        return reference.gradient(logits_nv, log_total_n, target_n, grad_n, real)
    logits_nv, columns = logits_nv.contiguous(), logits_nv.size(1)
    _gradient[(len(logits_nv),)](
        logits_nv,
        log_total_n.contiguous(),
        target_n.contiguous(),
        grad_n.contiguous(),
        columns,
        real,
        **_block(columns),
    )
    return logits_nv


class _Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_nv: Tensor, target_n: Tensor, real: int) -> Tensor:
        logits_nv, out = logits_nv.contiguous(), _per_token(logits_nv)
        columns = logits_nv.size(1)
        _log_total[(len(out),)](logits_nv, out, columns, real, **_block(columns))
        ctx.real = real
        ctx.save_for_backward(logits_nv, out, target_n)
        return out - logits_nv.gather(1, target_n[:, None]).squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits_nv, log_total_n, target_n = ctx.saved_tensors
        return gradient(logits_nv, log_total_n, target_n, grads[0], ctx.real), None, None


def full(logits_nv: Tensor, target_n: Tensor, real: int) -> Tensor:
    """Return the loss of every token over the full vocabulary."""
    if dtype_limit(logits_nv.dtype):
        return reference.full(logits_nv, target_n, real)
    return _Full.apply(logits_nv, target_n, real)


TRITON = CrossEntropy(largest=largest, sums=sums, gradient=gradient, full=full)
"""The parts on a GPU. No other tensor of the size of the logits is kept."""
