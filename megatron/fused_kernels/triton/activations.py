"""Triton kernels of the MLP's activations: bias and GELU, and gated linear units."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.fused_kernels.reference import activations as reference
from megatron.fused_kernels.reference.activations import GeluForm, GluKind
from megatron.fused_kernels.triton.launch import elementwise_grid, tile_grid, tile_of, tile_rows
from megatron.fused_kernels.triton.limits import dtype_limit

_BLOCK = 1024
_CURVES = {
    **{"tanh": 0, "erf": 1},
    **{"geglu": 1, "geglu_tanh": 0, "liglu": 2, "reglu": 3, "swiglu": 4},
}
"""Which curve a form of GELU is, or a gate goes through."""


@triton.jit
def _curve(x, CURVE: tl.constexpr):
    """Return the curve's value and slope at x."""
    if CURVE == 0:  # 0.5 (1 + tanh(z)) is the logistic function of 2 z
        square = x * x
        share = tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * square))
        inner = 1.5957691216057308 * (1.0 + 0.134145 * square)
        value, slope = x * share, share + x * share * (1.0 - share) * inner
    elif CURVE == 1:
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value, slope = x * share, share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif CURVE == 2:
        value, slope = x, x * 0.0 + 1.0
    elif CURVE == 3:
        value, slope = tl.maximum(x, 0.0), tl.where(x > 0.0, 1.0, 0.0)
    else:
        share = tl.sigmoid(x)
        value, slope = x * share, share * (1.0 + x * (1.0 - share))
    return value, slope


@triton.jit
def _gelu_forward(
    x, bias, out, numel, columns, CURVE: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < numel
    value = tl.load(x + i, mask=here, other=0.0).to(tl.float32)
    if BIASED:
        value += tl.load(bias + i % columns, mask=here, other=0.0).to(tl.float32)
    result, _ = _curve(value, CURVE)
    tl.store(out + i, result, mask=here)


@triton.jit
def _gelu_backward(
    x,
    bias,
    grad_out,
    grad,
    sums,
    rows,
    columns,
    CURVE: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient of a tile; with a bias, the sums of its columns too."""
    chunk, start = tile_of(columns, BLOCK)
    column = start + tl.arange(0, BLOCK)
    here = column < columns
    total = tl.zeros([BLOCK], tl.float32)
    if BIASED:
        shift = tl.load(bias + column, mask=here, other=0.0).to(tl.float32)
    for row in range(chunk * ROWS, tl.minimum(chunk * ROWS + ROWS, rows)):
        first = tl.cast(row, tl.int64) * columns
        value = tl.load(x + first + column, mask=here, other=0.0).to(tl.float32)
        if BIASED:
            value += shift
        _, slope = _curve(value, CURVE)
        dx = tl.load(grad_out + first + column, mask=here, other=0.0).to(tl.float32) * slope
        total += dx
        tl.store(grad + first + column, dx, mask=here)
    if BIASED:
        tl.store(sums + chunk * columns + column, total, mask=here)


@triton.jit
def _load_pairs(pointer, pair, here, BLOCK: tl.constexpr):
    """Return gates and ups [BLOCK] in fp32: neighbours in memory, loaded as vectors."""
    values = tl.load(pointer + pair, mask=here, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(values, [BLOCK, 2]))


@triton.jit
def _glu_forward(
    x, bias, out, numel, columns, CURVE: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i, pair = start + tl.arange(0, BLOCK), 2 * start + tl.arange(0, 2 * BLOCK)
    here = pair < 2 * tl.cast(numel, tl.int64)
    gate, up = _load_pairs(x, pair, here, BLOCK)
    if BIASED:
        gate_bias, up_bias = _load_pairs(bias, pair % (2 * columns), here, BLOCK)
        gate += gate_bias
        up += up_bias
    value, _ = _curve(gate, CURVE)
    tl.store(out + i, value * up, mask=i < numel)


@triton.jit
def _glu_backward(
    x,
    bias,
    grad_out,
    grad,
    sums,
    rows,
    columns,
    CURVE: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient of a tile of pairs; with a bias, the sums of its columns too."""
    chunk, start = tile_of(columns, BLOCK)
    column, pair = start + tl.arange(0, BLOCK), 2 * start + tl.arange(0, 2 * BLOCK)
    here, both = column < columns, pair < 2 * columns
    grad_gate, grad_up = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    if BIASED:
        gate_bias, up_bias = _load_pairs(bias, pair, both, BLOCK)
    for row in range(chunk * ROWS, tl.minimum(chunk * ROWS + ROWS, rows)):
        first = tl.cast(row, tl.int64) * columns
        gate, up = _load_pairs(x + 2 * first, pair, both, BLOCK)
        if BIASED:
            gate += gate_bias
            up += up_bias
        value, slope = _curve(gate, CURVE)
        dy = tl.load(grad_out + first + column, mask=here, other=0.0).to(tl.float32)
        d_gate, d_up = dy * up * slope, dy * value
        grad_gate += d_gate
        grad_up += d_up
        tl.store(grad + 2 * first + pair, tl.interleave(d_gate, d_up), mask=both)
    if BIASED:
        target = sums + 2 * chunk * columns + pair
        tl.store(target, tl.interleave(grad_gate, grad_up), mask=both)


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, curve: int, gated: bool) -> Tensor:
        columns = x.size(-1) // (2 if gated else 1)
        out = x.new_empty(*x.shape[:-1], columns)
        (_glu_forward if gated else _gelu_forward)[elementwise_grid(out.numel(), _BLOCK)](
            x,
            x if bias is None else bias,
            out,
            out.numel(),
            columns,
            CURVE=curve,
            BIASED=bias is not None,
            BLOCK=_BLOCK,
        )
        ctx.curve, ctx.gated, ctx.columns = curve, gated, columns
        ctx.save_for_backward(x, bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, bias = ctx.saved_tensors
        grad_out, grad, columns = grads[0].contiguous(), torch.empty_like(x), ctx.columns
        rows, block = grad_out.numel() // columns, min(_BLOCK, triton.next_power_of_2(columns))
        tile = tile_rows(rows, columns, block, x.device), block
        chunks = triton.cdiv(rows, tile[0]) if bias is not None else 0
        sums = torch.empty(chunks, x.size(-1), dtype=torch.float32, device=x.device)
        (_glu_backward if ctx.gated else _gelu_backward)[tile_grid(rows, columns, tile)](
            x,
            x if bias is None else bias,
            grad_out,
            grad,
            sums,
            rows,
            columns,
            CURVE=ctx.curve,
            BIASED=bias is not None,
            ROWS=tile[0],
            BLOCK=block,
        )
        return grad, None if bias is None else sums.sum(0).to(bias.dtype), None, None


def bias_gelu(x: Tensor, bias: Tensor | None, form: GeluForm) -> Tensor:
    """Compute the result of the reference in 32 bits."""
    if dtype_limit(x.dtype):
        return reference.bias_gelu(x, bias, form)
    return _Activation.apply(x.contiguous(), bias, _CURVES[form], False)


def glu(x: Tensor, bias: Tensor | None, kind: GluKind) -> Tensor:
    """Compute the result of the reference in 32 bits."""
    if dtype_limit(x.dtype):
        return reference.glu(x, bias, kind)
    return _Activation.apply(x.contiguous(), bias, _CURVES[kind], True)
