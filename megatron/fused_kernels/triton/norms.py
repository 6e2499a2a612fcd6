"""Triton kernels of LayerNorm and RMSNorm, alone or with the sum of a residual in front.

One kernel computes all gradients of narrow rows: each program sums the gradients of weight and bias
over its rows. Where these sums and a row do not fit into registers there are two kernels, one over
rows for the input and one over columns for weight and bias.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.fused_kernels.reference import norms as reference
from megatron.fused_kernels.reference.bias_dropout_add import bias_dropout_add
from megatron.fused_kernels.triton.launch import num_multiprocessors, tile_of
from megatron.fused_kernels.triton.limits import norm_limit

_FUSED_SUMS = 16384  # features times sums, at least two, that a program keeps in registers
_MOST_REGISTERS = 128  # of each of the 512 threads that a multiprocessor has for fused gradients
_COLUMNS, _COLUMN_ROWS = 1024, 128  # tile of the kernel of columns


@triton.jit
def _forward(
    x,
    y,
    y_bias,
    total,
    weight,
    bias,
    out,
    means,
    scales,
    columns,
    eps,
    CENTRED: tl.constexpr,
    BIASED: tl.constexpr,
    ADDS: tl.constexpr,
    Y_BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    features = tl.arange(0, BLOCK)
    here = features < columns
    value = tl.load(x + row * columns + features, mask=here, other=0.0).to(tl.float32)
    if ADDS:
        added = tl.load(y + row * columns + features, mask=here, other=0.0).to(tl.float32)
        if Y_BIASED:
            added += tl.load(y_bias + features, mask=here, other=0.0).to(tl.float32)
        # Rounded as it is stored: backward reads it again.
        value = (value + added).to(total.dtype.element_ty)
        tl.store(total + row * columns + features, value, mask=here)
        value = value.to(tl.float32)
    if CENTRED:
        mean = tl.sum(value, 0) / columns
        value = tl.where(here, value - mean, 0.0)
        tl.store(means + row, mean)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / columns + eps)
    tl.store(scales + row, scale)
    result = value * scale * tl.load(weight + features, mask=here, other=0.0).to(tl.float32)
    if BIASED:
        result += tl.load(bias + features, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * columns + features, result, mask=here)


@triton.jit
def _input_gradient(
    x,
    w,
    grad_out,
    grad_total,
    means,
    scales,
    grad,
    row,
    columns,
    CENTRED: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a row of the input's gradient; return it, the result's gradient, the normalized row."""
    features = tl.arange(0, BLOCK)
    here = features < columns
    first = tl.cast(row, tl.int64) * columns
    normal = tl.load(x + first + features, mask=here, other=0.0).to(tl.float32)
    dy = tl.load(grad_out + first + features, mask=here, other=0.0).to(tl.float32)
    scale = tl.load(scales + row)
    if CENTRED:
        normal = normal - tl.load(means + row)
    normal = tl.where(here, normal * scale, 0.0)
    pull = dy * w
    # In this order, and scaled first, the widest rows of LayerNorm stay within 128 registers.
    dx = pull * scale
    if CENTRED:
        dx -= tl.sum(pull, 0) * scale / columns
    dx -= normal * (tl.sum(pull * normal, 0) * scale / columns)
    if ADDS:
        dx += tl.load(grad_total + first + features, mask=here, other=0.0).to(tl.float32)
    tl.store(grad + first + features, dx, mask=here)
    return dx, dy, normal


@triton.jit
def _backward(
    x,
    weight,
    grad_out,
    grad_total,
    means,
    scales,
    grad,
    sums,
    rows,
    columns,
    CENTRED: tl.constexpr,
    BIASED: tl.constexpr,
    ADDS: tl.constexpr,
    Y_BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient of the input, and this program's gradient sums for weight, bias and y's bias."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    features = tl.arange(0, BLOCK)
    here = features < columns
    w = tl.load(weight + features, mask=here, other=0.0).to(tl.float32)
    grad_weight = tl.zeros([BLOCK], tl.float32)
    grad_bias = tl.zeros([BLOCK], tl.float32)
    grad_y = tl.zeros([BLOCK], tl.float32)
    for row in range(program, rows, programs):
        dx, dy, normal = _input_gradient(
            x, w, grad_out, grad_total, means, scales, grad, row, columns, CENTRED, ADDS, BLOCK
        )
        grad_weight += dy * normal
        if BIASED:
            grad_bias += dy
        if Y_BIASED:
            grad_y += dx
    target, size = sums + program * columns, programs * columns
    tl.store(target + features, grad_weight, mask=here)
    if BIASED:
        tl.store(target + size + features, grad_bias, mask=here)
    if Y_BIASED:
        tl.store(target + (2 if BIASED else 1) * size + features, grad_y, mask=here)


@triton.jit
def _backward_of_rows(
    x,
    weight,
    grad_out,
    grad_total,
    means,
    scales,
    grad,
    columns,
    CENTRED: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient of the input alone, a program for each row."""
    row = tl.program_id(0)
    features = tl.arange(0, BLOCK)
    w = tl.load(weight + features, mask=features < columns, other=0.0).to(tl.float32)
    _input_gradient(
        x, w, grad_out, grad_total, means, scales, grad, row, columns, CENTRED, ADDS, BLOCK
    )


@triton.jit
def _column_sums(
    x,
    grad_out,
    grad,
    means,
    scales,
    sums,
    rows,
    columns,
    CENTRED: tl.constexpr,
    BIASED: tl.constexpr,
    Y_BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums over a tile's rows, as `_backward` makes them: of weight, bias and y's bias."""
    chunk, start = tile_of(columns, BLOCK)
    column = start + tl.arange(0, BLOCK)
    here = column < columns
    grad_weight = tl.zeros([BLOCK], tl.float32)
    grad_bias = tl.zeros([BLOCK], tl.float32)
    grad_y = tl.zeros([BLOCK], tl.float32)
    for row in range(chunk * ROWS, tl.minimum(chunk * ROWS + ROWS, rows)):
        first = tl.cast(row, tl.int64) * columns
        normal = tl.load(x + first + column, mask=here, other=0.0).to(tl.float32)
        dy = tl.load(grad_out + first + column, mask=here, other=0.0).to(tl.float32)
        if CENTRED:
            normal = normal - tl.load(means + row)
        grad_weight += dy * normal * tl.load(scales + row)
        if BIASED:
            grad_bias += dy
        if Y_BIASED:
            grad_y += tl.load(grad + first + column, mask=here, other=0.0).to(tl.float32)
    target, size = sums + chunk * columns, tl.cdiv(rows, ROWS) * columns
    tl.store(target + column, grad_weight, mask=here)
    if BIASED:
        tl.store(target + size + column, grad_bias, mask=here)
    if Y_BIASED:
        tl.store(target + (2 if BIASED else 1) * size + column, grad_y, mask=here)


class _Norm(torch.autograd.Function):
    """Return (total, normed): total = x + y + y_bias, or x itself without y; normed is its norm.

    Backward adds the gradients of both results in the norm's pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor | None,
        y_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        centred: bool,
    ) -> tuple[Tensor, Tensor]:
        columns = x.size(-1)
        rows, block = x.numel() // columns, triton.next_power_of_2(columns)
        total = x
        if y is not None:
            total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, y.dtype))
        out = torch.empty_like(x, dtype=weight.dtype)
        scales = torch.empty(rows, dtype=torch.float32, device=x.device)
        means = torch.empty_like(scales) if centred else scales
        _forward[(rows,)](
            x,
            x if y is None else y,
            weight if y_bias is None else y_bias,
            total,
            weight,
            weight if bias is None else bias,
            out,
            means,
            scales,
            columns,
            eps,
            CENTRED=centred,
            BIASED=bias is not None,
            ADDS=y is not None,
            Y_BIASED=y_bias is not None,
            BLOCK=block,
            num_warps=_warps(block),
        )
        ctx.centred = centred
        ctx.dtypes = [None if each is None else each.dtype for each in (x, y, y_bias, bias)]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, weight, means, scales)
        return total, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, means, scales = ctx.saved_tensors
        x_dtype, y_dtype, y_bias_dtype, bias_dtype = ctx.dtypes
        grad_total, grad_out = (None if grad is None else grad.contiguous() for grad in grads)
        if grad_out is None:
            grad_out = torch.zeros_like(total, dtype=weight.dtype)
        given = (total, weight, grad_out, grad_total, means, scales)
        biased = (bias_dtype is not None, y_bias_dtype is not None)
        grad, sums = _gradients(*given, centred=ctx.centred, biased=biased)
        sums = sums.sum(1)
        return (
            grad.to(x_dtype),
            None if y_dtype is None else grad.to(y_dtype),
            sums[-1].to(y_bias_dtype) if biased[1] else None,
            sums[0].to(weight.dtype),
            sums[1].to(bias_dtype) if biased[0] else None,
            None,
            None,
        )


def _gradients(
    total: Tensor,
    weight: Tensor,
    grad_out: Tensor,
    grad_total: Tensor | None,
    means: Tensor,
    scales: Tensor,
    *,
    centred: bool,
    biased: tuple[bool, bool],
) -> tuple[Tensor, Tensor]:
    """Return the input's gradient, and partial sums of the gradients of weight, bias and y's bias.

    Args:
        biased: whether there is a bias, and one of y.
    """
    rows, columns = scales.numel(), total.size(-1)
    block = triton.next_power_of_2(columns)
    fused, num_warps = block * max(2, 1 + sum(biased)) <= _FUSED_SUMS, _warps(block)
    # Programs that sum have to fill the GPU alone: 16 warps on each multiprocessor.
    programs = min(rows, num_multiprocessors(total.device) * (16 // num_warps))
    chunks = programs if fused else triton.cdiv(rows, _COLUMN_ROWS)
    grad = torch.empty_like(total)
    sums = torch.empty(1 + sum(biased), chunks, columns, dtype=torch.float32, device=total.device)
    added = grad_out if grad_total is None else grad_total
    row_inputs = (total, weight, grad_out, added, means, scales, grad)
    adds = grad_total is not None
    row_options = {"CENTRED": centred, "ADDS": adds, "BLOCK": block, "num_warps": num_warps}
    sum_options = {"CENTRED": centred, "BIASED": biased[0], "Y_BIASED": biased[1]}
    if fused:
        # Without a limit ptxas spills a few registers to fit in more programs than there are.
        options = {**row_options, **sum_options, "maxnreg": _MOST_REGISTERS}
        _backward[(programs,)](*row_inputs, sums, rows, columns, **options)
        return grad, sums
    _backward_of_rows[(rows,)](*row_inputs, columns, **row_options)
    _column_sums[(chunks * triton.cdiv(columns, _COLUMNS),)](
        total,
        grad_out,
        grad,
        means,
        scales,
        sums,
        rows,
        columns,
        ROWS=_COLUMN_ROWS,
        BLOCK=_COLUMNS,
        **sum_options,
    )
    return grad, sums


def _warps(block: int) -> int:
    """Return the number of warps for a row: threads of 8 features, one load of 16 bytes in bf16."""
    return min(16, max(1, block // 256))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Compute the result of the reference in 32 bits."""
    if norm_limit(x.dtype, x.size(-1)):
        return reference.layer_norm(x, weight, bias, eps)
    return _Norm.apply(x.contiguous(), None, None, weight, bias, eps, True)[1]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute the result of the reference in 32 bits."""
    if norm_limit(x.dtype, x.size(-1)):
        return reference.rms_norm(x, weight, eps)
    return _Norm.apply(x.contiguous(), None, None, weight, None, eps, False)[1]


def add_norm(
    x: Tensor,
    y: Tensor | None,
    y_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    """Return (x + y + y_bias, its norm); without y (x, its norm).

    Backward adds the gradients of both results in the norm's pass, and sums the biases' gradients.

    Args:
        centred: LayerNorm; else RMSNorm.

    Shapes: x and y [..., h], y_bias, weight and bias [h] -> two of [..., h].
    """
    if norm_limit(x.dtype, x.size(-1)):
        total = x if y is None else bias_dropout_add(y, y_bias, x, 0.0, False)
        if centred:
            return total, reference.layer_norm(total, weight, bias, eps)
        return total, reference.rms_norm(total, weight, eps)
    y = None if y is None else y.contiguous()
    total, normed = _Norm.apply(x.contiguous(), y, y_bias, weight, bias, eps, centred)
    return total, normed
