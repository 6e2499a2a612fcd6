"""Triton kernels of bias, dropout and residual. The mask is never stored: backward draws it again."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.fused_kernels.reference import bias_dropout_add as reference
from megatron.fused_kernels.triton.launch import elementwise_grid

_BLOCK = 1024


@triton.jit
def _forward(
    y,
    bias,
    residual,
    out,
    seed,
    p,
    numel,
    columns,
    BIASED: tl.constexpr,
    DROPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = i < numel
    value = tl.load(y + i, mask=here, other=0.0).to(tl.float32)
    if BIASED:
        value += tl.load(bias + i % columns, mask=here, other=0.0).to(tl.float32)
    if DROPS:
        value = tl.where(tl.rand(tl.load(seed), i) >= p, value / (1.0 - p), 0.0)
    value += tl.load(residual + i, mask=here, other=0.0).to(tl.float32)
    tl.store(out + i, value, mask=here)


@triton.jit
def _backward(grad_out, grad, seed, p, numel, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = i < numel
    value = tl.load(grad_out + i, mask=here, other=0.0).to(tl.float32)
    value = tl.where(tl.rand(tl.load(seed), i) >= p, value / (1.0 - p), 0.0)
    tl.store(grad + i, value, mask=here)


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor | None, residual: Tensor, p: float) -> Tensor:
        y, residual = y.contiguous(), residual.contiguous()
        out = torch.empty_like(residual, dtype=torch.promote_types(y.dtype, residual.dtype))
        # Drawn on the device: asking for its value would wait for everything launched so far.
        seed = torch.randint(2**31 - 1, (1,), device=y.device) if p else out
        _forward[elementwise_grid(y.numel(), _BLOCK)](
            y,
            y if bias is None else bias,
            residual,
            out,
            seed,
            p,
            y.numel(),
            y.size(-1),
            BIASED=bias is not None,
            DROPS=p > 0,
            BLOCK=_BLOCK,
        )
        ctx.p, ctx.dtypes = p, (y.dtype, bias.dtype if bias is not None else None, residual.dtype)
        ctx.save_for_backward(*([seed] if p else []))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, Tensor, None]:
        of_y, of_bias, of_residual = ctx.dtypes
        grad_out = grads[0].contiguous()
        grad = grad_out.to(of_y)
        if ctx.p:
            grad, numel = torch.empty_like(grad_out, dtype=of_y), grad_out.numel()
            _backward[elementwise_grid(numel, _BLOCK)](
                grad_out, grad, ctx.saved_tensors[0], ctx.p, numel, BLOCK=_BLOCK
            )
        grad_bias = grad.flatten(0, -2).sum(0).to(of_bias) if of_bias else None
        return grad, grad_bias, grad_out.to(of_residual), None


def bias_dropout_add(
    y: Tensor, bias: Tensor | None, residual: Tensor, p: float, training: bool
) -> Tensor:
    """Return what the reference does, computed in 32 bits; `y` is left as it is."""
    if reference.unsupported(torch.promote_types(y.dtype, residual.dtype), y.numel()):
        return reference.bias_dropout_add(y, bias, residual, p, training)
    return _BiasDropoutAdd.apply(y, bias, residual, p if training else 0.0)
