"""Triton kernels of rotary position embedding: one program, the heads of one position.

`split_rotary` takes the fused product of queries, keys and values, and its backward writes the
gradient of that product, so nothing concatenates the three gradients afterwards.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.fused_kernels.reference import rotary as reference
from megatron.fused_kernels.triton.launch import warps
from megatron.fused_kernels.triton.limits import rotary_limit

_MOST_FEATURES = 8192  # of a program of `_split`


@triton.jit
def _load_angles(cos, sin, first, half, HALF: tl.constexpr):
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
    c, s = _load_angles(cos, sin, sample * angle_b + position * angle_s, half, HALF)
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


@triton.jit
def _split_heads(
    start,
    to_query,
    to_key,
    is_query,
    is_key,
    c,
    s,
    half,
    width,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """Turn the queries and keys of the fused heads at `start`, and write them to their tensors."""
    feature = tl.arange(0, HALF)[None, :]
    paired = feature < half
    here = (is_query | is_key) & paired
    first = tl.load(start + feature, mask=here, other=0.0).to(tl.float32)
    second = tl.load(start + half + feature, mask=here, other=0.0).to(tl.float32)
    turned = first * c - second * s
    tl.store(to_query + feature, turned, mask=is_query & paired)
    tl.store(to_key + feature, turned, mask=is_key & paired)
    turned = second * c + first * s
    tl.store(to_query + half + feature, turned, mask=is_query & paired)
    tl.store(to_key + half + feature, turned, mask=is_key & paired)
    if REST > 0:
        other = 2 * half + tl.arange(0, REST)[None, :]
        left = other < width
        rest = tl.load(start + other, mask=(is_query | is_key) & left, other=0.0)
        tl.store(to_query + other, rest, mask=is_query & left)
        tl.store(to_key + other, rest, mask=is_key & left)


@triton.jit
def _load_gradients(to_query, to_key, to_value, is_query, is_key, is_value, feature, here):
    """Return some features of the gradients of all heads, each from the part that it belongs to."""
    found = tl.load(to_query + feature, mask=is_query & here, other=0.0).to(tl.float32)
    found += tl.load(to_key + feature, mask=is_key & here, other=0.0).to(tl.float32)
    found += tl.load(to_value + feature, mask=is_value & here, other=0.0).to(tl.float32)
    return found


@triton.jit
def _gather_heads(
    start,
    to_query,
    to_key,
    to_value,
    is_query,
    is_key,
    is_value,
    c,
    s,
    half,
    width,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """Rotate gradients of queries and keys back; write the gradients of all heads to `start`."""
    feature = tl.arange(0, HALF)[None, :]
    paired, known = feature < half, is_query | is_key | is_value
    first = _load_gradients(to_query, to_key, to_value, is_query, is_key, is_value, feature, paired)
    second = _load_gradients(
        to_query, to_key, to_value, is_query, is_key, is_value, half + feature, paired
    )
    # The inverse of a turn is the turn by the opposite angle. Values are not turned.
    turned = tl.where(is_value, first, first * c + second * s)
    tl.store(start + feature, turned, mask=known & paired)
    turned = tl.where(is_value, second, second * c - first * s)
    tl.store(start + half + feature, turned, mask=known & paired)
    if REST > 0:
        other = 2 * half + tl.arange(0, REST)[None, :]
        left = other < width
        rest = _load_gradients(to_query, to_key, to_value, is_query, is_key, is_value, other, left)
        tl.store(start + other, rest, mask=known & left)


@triton.jit
def _split(
    fused,
    query,
    key,
    value,
    cos,
    sin,
    samples,
    heads,
    queries,
    width,
    half,
    chunks,
    query_b,
    query_a,
    query_s,
    key_b,
    key_a,
    key_s,
    value_b,
    value_a,
    value_s,
    angle_b,
    angle_s,
    BACKWARD: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """Turn queries and keys out of the fused heads; backward turns and gathers their gradients."""
    row, chunk = tl.program_id(0).to(tl.int64) // chunks, tl.program_id(0) % chunks
    position, sample = row // samples, row % samples
    head = chunk * HEADS + tl.arange(0, HEADS)[:, None]
    group, part = (head // (queries + 2)).to(tl.int64), head % (queries + 2)
    is_query, is_key = (head < heads) & (part < queries), (head < heads) & (part == queries)
    is_value = (head < heads) & (part > queries)
    start = fused + row * heads * width + head * width
    to_query = query + sample * query_b + position * query_s + (group * queries + part) * query_a
    to_key = key + sample * key_b + position * key_s + group * key_a
    to_value = value + sample * value_b + position * value_s + group * value_a
    c, s = _load_angles(cos, sin, sample * angle_b + position * angle_s, half, HALF)
    if BACKWARD:
        _gather_heads(
            start,
            to_query,
            to_key,
            to_value,
            is_query,
            is_key,
            is_value,
            c,
            s,
            half,
            width,
            HALF,
            REST,
        )
    else:
        _split_heads(start, to_query, to_key, is_query, is_key, c, s, half, width, HALF, REST)


def _split_or_gather(
    fused: Tensor, parts: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor, backward: bool
) -> None:
    """Write queries and keys of `parts` from `fused`; backward, `fused` from all three."""
    s, b, groups, heads_per_group, d = fused.shape
    heads, half, block = groups * heads_per_group, cos.size(-1), triton.next_power_of_2(d)
    at_once = min(triton.next_power_of_2(heads), max(1, _MOST_FEATURES // block))
    chunks, rest = triton.cdiv(heads, at_once), d - 2 * half
    _split[(s * b * chunks,)](
        fused,
        *parts,
        cos,
        sin,
        b,
        heads,
        heads_per_group - 2,
        d,
        half,
        chunks,
        *(stride for part in parts for stride in part.stride()[:3]),
        _sample_stride(cos),
        cos.stride(-2),
        BACKWARD=backward,
        HEADS=at_once,
        HALF=triton.next_power_of_2(half),
        REST=triton.next_power_of_2(rest) if rest else 0,
        num_warps=warps(at_once * block),
    )


class _SplitRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fused: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s, b, groups, heads_per_group, d = fused.shape
        # As attention's result is then laid out: [s, b, a, d], as the next product reads it.
        query = fused.new_empty(s, b, groups * (heads_per_group - 2), d).permute(1, 2, 0, 3)
        key = fused.new_empty(s, b, groups, d).permute(1, 2, 0, 3)
        value = fused[:, :, :, -1].permute(1, 2, 0, 3)
        # Values stay where they are: forward does not use the third pointer.
        _split_or_gather(fused, (query, key, key), cos, sin, False)
        ctx.save_for_backward(cos, sin)
        ctx.shape = fused.shape
        return query, key, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in grads)
        fused = query.new_empty(ctx.shape)
        cos, sin = ctx.saved_tensors
        _split_or_gather(fused, (query, key, value), cos, sin, True)
        return fused, None, None


def split_rotary(fused: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the result of the reference in 32 bits. No gradient for the angles."""
    if rotary_limit(fused.dtype, 1, fused.size(-1)):
        return reference.split_rotary(fused, cos, sin)
    query, key, value = _SplitRotary.apply(fused.contiguous(), cos.contiguous(), sin.contiguous())
    return query, key, value


def _sample_stride(cos: Tensor) -> int:
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
        _sample_stride(cos),
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
