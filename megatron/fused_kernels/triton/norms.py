"""Triton kernels of layer norm and root-mean-square norm."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.fused_kernels.reference import norms as reference
from megatron.fused_kernels.triton.launch import warps

_PROGRAMS = 256  # each sums the weight's gradient over its share of the rows


@triton.jit
def _forward(
    x,
    weight,
    bias,
    out,
    means,
    scales,
    columns,
    eps,
    CENTRED: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    features = tl.arange(0, BLOCK)
    here = features < columns
    value = tl.load(x + row * columns + features, mask=here, other=0.0).to(tl.float32)
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
def _backward(
    x,
    weight,
    grad_out,
    means,
    scales,
    grad,
    grad_weights,
    grad_biases,
    rows,
    columns,
    CENTRED: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    features = tl.arange(0, BLOCK)
    here = features < columns
    w = tl.load(weight + features, mask=here, other=0.0).to(tl.float32)
    grad_weight = tl.zeros([BLOCK], tl.float32)
    grad_bias = tl.zeros([BLOCK], tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        start = row * columns
        value = tl.load(x + start + features, mask=here, other=0.0).to(tl.float32)
        dy = tl.load(grad_out + start + features, mask=here, other=0.0).to(tl.float32)
        scale = tl.load(scales + row)
        if CENTRED:
            value = value - tl.load(means + row)
        normal = tl.where(here, value * scale, 0.0)
        grad_weight += dy * normal
        if BIASED:
            grad_bias += dy
        pull = dy * w
        dx = pull - normal * (tl.sum(pull * normal, 0) / columns)
        if CENTRED:
            dx -= tl.sum(pull, 0) / columns
        tl.store(grad + start + features, dx * scale, mask=here)
    tl.store(grad_weights + program * columns + features, grad_weight, mask=here)
    if BIASED:
        tl.store(grad_biases + program * columns + features, grad_bias, mask=here)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
    ) -> Tensor:
        x = x.contiguous()
        columns = x.size(-1)
        rows, block = x.numel() // columns, triton.next_power_of_2(columns)
        out = torch.empty_like(x)
        scales = torch.empty(rows, dtype=torch.float32, device=x.device)
        means = torch.empty_like(scales) if centred else scales
        _forward[(rows,)](
            x,
            weight,
            weight if bias is None else bias,
            out,
            means,
            scales,
            columns,
            eps,
            CENTRED=centred,
            BIASED=bias is not None,
            BLOCK=block,
            num_warps=warps(block),
        )
        ctx.centred, ctx.bias_dtype = centred, None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight, means, scales)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        x, weight, means, scales = ctx.saved_tensors
        grad_out, columns = grads[0].contiguous(), x.size(-1)
        rows, block = scales.numel(), triton.next_power_of_2(columns)
        programs, biased = min(rows, _PROGRAMS), ctx.bias_dtype is not None
        grad = torch.empty_like(x)
        sums = torch.empty(
            2 if biased else 1, programs, columns, dtype=torch.float32, device=x.device
        )
        _backward[(programs,)](
            x,
            weight,
            grad_out,
            means,
            scales,
            grad,
            sums[0],
            sums[-1],
            rows,
            columns,
            CENTRED=ctx.centred,
            BIASED=biased,
            BLOCK=block,
            num_warps=warps(block),
        )
        of_weight = sums[0].sum(0).to(weight.dtype)
        of_bias = sums[1].sum(0).to(ctx.bias_dtype) if biased else None
        return grad, of_weight, of_bias, None, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return what the reference does, computed in 32 bits."""
    if reference.unsupported(x.dtype, x.size(-1)):
        return reference.layer_norm(x, weight, bias, eps)
    return _Norm.apply(x, weight, bias, eps, True)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return what the reference does, computed in 32 bits."""
    if reference.unsupported(x.dtype, x.size(-1)):
        return reference.rms_norm(x, weight, eps)
    return _Norm.apply(x, weight, None, eps, False)
