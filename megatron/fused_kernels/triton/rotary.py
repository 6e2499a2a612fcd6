"""Triton kernel of rotary position embedding: one program, the heads of one position."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.fused_kernels.reference import rotary as reference
from megatron.fused_kernels.triton.launch import warps
from megatron.fused_kernels.triton.limits import rotary_limit


@triton.jit
def load_angles(cos, sin, first, half, HALF: tl.constexpr):
    """Return cosines and sines of the angles from `first` on, [1, HALF]."""
    feature = tl.arange(0, HALF)[None, :]
    c = tl.load(cos + first + feature, mask=feature < half, other=0.0)
    s = tl.load(sin + first + feature, mask=feature < half, other=0.0)
    return c, s


@triton.jit
def _turn(
    x,
    cos,
    sin,
    out,
    heads,
    positions,
    width,
    half,
    x_b,
    x_a,
    x_s,
    out_b,
    out_a,
    out_s,
    angle_b,
    angle_s,
    SIGN: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    sample, position = program // positions, program % positions
    # int64: a head's offset within a sample may pass 2^31 elements.
    head = tl.arange(0, HEADS)[:, None].to(tl.int64)
    feature = tl.arange(0, HALF)[None, :]
    c, s = load_angles(cos, sin, sample * angle_b + position * angle_s, half, HALF)
    s *= SIGN
    here = (head < heads) & (feature < half)
    start = x + sample * x_b + head * x_a + position * x_s
    goal = out + sample * out_b + head * out_a + position * out_s
    first = tl.load(start + feature, mask=here, other=0.0).to(tl.float32)
    second = tl.load(start + half + feature, mask=here, other=0.0).to(tl.float32)
    tl.store(goal + feature, first * c - second * s, mask=here)
    tl.store(goal + half + feature, second * c + first * s, mask=here)
    if REST > 0:
        other = 2 * half + tl.arange(0, REST)[None, :]
        left = (head < heads) & (other < width)
        tl.store(goal + other, tl.load(start + other, mask=left, other=0.0), mask=left)


def sample_stride(cos: Tensor) -> int:
    """Return the distance between the angles of two samples: 0 where they share them."""
    return cos.stride(0) if cos.dim() == 4 and cos.size(0) > 1 else 0


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    b, a, s, d = x.shape
    half = cos.size(-1)
    # Attention's result gets the layout of the queries: [s, b, a, d], as the next product reads it.
    out = x.new_empty(s, b, a, d).permute(1, 2, 0, 3)
    rest = d - 2 * half
    _turn[(b * s,)](
        x,
        cos,
        sin,
        out,
        a,
        s,
        d,
        half,
        *x.stride()[:3],
        *out.stride()[:3],
        sample_stride(cos),
        cos.stride(-2),
        SIGN=sign,
        HEADS=triton.next_power_of_2(a),
        HALF=triton.next_power_of_2(half),
        REST=triton.next_power_of_2(rest) if rest else 0,
        num_warps=warps(triton.next_power_of_2(a) * triton.next_power_of_2(d)),
    )
    return out


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        # The inverse of a turn is the turn by the opposite angle.
        return _rotate(grads[0], cos, sin, -1), None, None


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute the result of the reference in 32 bits. No gradient for the angles."""
    if rotary_limit(x.dtype, x.size(1), x.size(-1)):
        return reference.rotary(x, cos, sin)
    return _Rotary.apply(x, cos.contiguous(), sin.contiguous())
