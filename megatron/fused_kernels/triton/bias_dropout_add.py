"""Triton kernels of bias, dropout and residual. The mask is never stored: backward draws it again."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.fused_kernels.reference import bias_dropout_add as reference
from megatron.fused_kernels.triton.launch import tile_grid, tile_of, tile_rows
from megatron.fused_kernels.triton.limits import dropout_limit

_BLOCK = 1024


@triton.jit
def _draw_kept(seed, row, start, columns, p, BLOCK: tl.constexpr):
    """Draw which of BLOCK features from column `start` on are kept: four from each draw."""
    draws = row * tl.cdiv(columns, 4) + start // 4 + tl.arange(0, BLOCK // 4)
    a, b, c, d = tl.rand4x(seed, draws.to(tl.int32))
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d)) >= p


@triton.jit
def _forward(
    y,
    bias,
    residual,
    out,
    seed,
    p,
    rows,
    columns,
    BIASED: tl.constexpr,
    DROPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk, start = tile_of(columns, BLOCK)
    column = start + tl.arange(0, BLOCK)
    here = column < columns
    if BIASED:
        shift = tl.load(bias + column, mask=here, other=0.0).to(tl.float32)
    if DROPS:
        key = tl.load(seed)
    for row in range(chunk * ROWS, tl.minimum(chunk * ROWS + ROWS, rows)):
        first = tl.cast(row, tl.int64) * columns
        value = tl.load(y + first + column, mask=here, other=0.0).to(tl.float32)
        if BIASED:
            value += shift
        if DROPS:
            value = tl.where(_draw_kept(key, row, start, columns, p, BLOCK), value / (1.0 - p), 0.0)
        value += tl.load(residual + first + column, mask=here, other=0.0).to(tl.float32)
        tl.store(out + first + column, value, mask=here)


@triton.jit
def _backward(
    grad_out,
    grad,
    sums,
    seed,
    p,
    rows,
    columns,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient of a tile of y; with a bias, the sums of its columns too."""
    chunk, start = tile_of(columns, BLOCK)
    column = start + tl.arange(0, BLOCK)
    here = column < columns
    key = tl.load(seed)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(chunk * ROWS, tl.minimum(chunk * ROWS + ROWS, rows)):
        first = tl.cast(row, tl.int64) * columns
        value = tl.load(grad_out + first + column, mask=here, other=0.0).to(tl.float32)
        value = tl.where(_draw_kept(key, row, start, columns, p, BLOCK), value / (1.0 - p), 0.0)
        total += value
        tl.store(grad + first + column, value, mask=here)
    if BIASED:
        tl.store(sums + chunk * columns + column, total, mask=here)


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor | None, residual: Tensor, p: float) -> Tensor:
        out = torch.empty_like(residual, dtype=torch.promote_types(y.dtype, residual.dtype))
        # Drawn on the device: asking for its value would wait for everything launched so far.
        seed = torch.randint(2**31 - 1, (1,), device=y.device) if p else out
        rows, columns, tile = _tiling(y)
        _forward[tile_grid(rows, columns, tile)](
            y,
            y if bias is None else bias,
            residual,
            out,
            seed,
            p,
            rows,
            columns,
            BIASED=bias is not None,
            DROPS=p > 0,
            ROWS=tile[0],
            BLOCK=tile[1],
        )
        ctx.p, ctx.dtypes = p, (y.dtype, bias.dtype if bias is not None else None, residual.dtype)
        ctx.save_for_backward(*([seed] if p else []))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, Tensor, None]:
        y_dtype, bias_dtype, residual_dtype = ctx.dtypes
        grad_out = grads[0].contiguous()
        if not ctx.p:
            grad = grad_out.to(y_dtype)
            grad_bias = grad.flatten(0, -2).sum(0).to(bias_dtype) if bias_dtype else None
            return grad, grad_bias, grad_out.to(residual_dtype), None
        grad = torch.empty_like(grad_out, dtype=y_dtype)
        rows, columns, tile = _tiling(grad_out)
        chunks = triton.cdiv(rows, tile[0]) if bias_dtype else 0
        sums = torch.empty(chunks, columns, dtype=torch.float32, device=grad.device)
        _backward[tile_grid(rows, columns, tile)](
            grad_out,
            grad,
            sums,
            ctx.saved_tensors[0],
            ctx.p,
            rows,
            columns,
            BIASED=bias_dtype is not None,
            ROWS=tile[0],
            BLOCK=tile[1],
        )
        grad_bias = sums.sum(0).to(bias_dtype) if bias_dtype else None
        return grad, grad_bias, grad_out.to(residual_dtype), None


def bias_dropout_add(
    y: Tensor, bias: Tensor | None, residual: Tensor, p: float, training: bool
) -> Tensor:
    """Compute the result of the reference in 32 bits; `y` is left as it is."""
    if dropout_limit(torch.promote_types(y.dtype, residual.dtype), y.numel()):
        return reference.bias_dropout_add(y, bias, residual, p, training)
    p = p if training else 0.0
    return _BiasDropoutAdd.apply(y.contiguous(), bias, residual.contiguous(), p)


def _tiling(x: Tensor) -> tuple[int, int, tuple[int, int]]:
    """Return rows and columns of `x` and of a tile; its columns are a multiple of 4, for the draws."""
    columns = x.size(-1)
    rows, block = x.numel() // columns, min(_BLOCK, max(4, triton.next_power_of_2(columns)))
    return rows, columns, (tile_rows(rows, columns, block, x.device), block)
