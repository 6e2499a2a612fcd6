"""Triton kernels of the fused product of queries, keys and values: rotary positions and its gradient.

Backward writes the gradient of the product, so nothing concatenates the three gradients of its heads, and
sums it for the product's bias on the way.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.fused_kernels.reference import rotary as reference
from megatron.fused_kernels.reference.rotary import Tables
from megatron.fused_kernels.triton.launch import tile_rows, warps
from megatron.fused_kernels.triton.limits import rotary_limit
from megatron.fused_kernels.triton.rotary import load_angles, sample_stride

_MOST_FEATURES = 8192  # of a program
_SUMMED_FEATURES = 1024  # of a program that keeps their sums in registers


@triton.jit
def _kinds(head, heads, queries):
    """Return the group of fused heads, their place in it, and which are queries, keys and values."""
    group, part = (head // (queries + 2)).to(tl.int64), head % (queries + 2)
    known = head < heads
    return (
        group,
        part,
        known & (part < queries),
        known & (part == queries),
        known & (part > queries),
    )


@triton.jit
def _write_heads(
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
def _split(
    fused,
    query,
    key,
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
    angle_b,
    angle_s,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """Turn some heads of one position out of the fused heads. Values stay where they are."""
    row, chunk = tl.program_id(0).to(tl.int64) // chunks, tl.program_id(0) % chunks
    position, sample = row // samples, row % samples
    head = chunk * HEADS + tl.arange(0, HEADS)[:, None]
    group, part, is_query, is_key, _ = _kinds(head, heads, queries)
    start = fused + row * heads * width + head * width
    to_query = query + sample * query_b + position * query_s + (group * queries + part) * query_a
    to_key = key + sample * key_b + position * key_s + group * key_a
    c, s = load_angles(cos, sin, sample * angle_b + position * angle_s, half, HALF)
    _write_heads(start, to_query, to_key, is_query, is_key, c, s, half, width, HALF, REST)


@triton.jit
def _load_gradients(to_query, to_key, to_value, is_query, is_key, is_value, feature, here):
    """Return some features of the gradients of all heads, each from the part that it belongs to."""
    found = tl.load(to_query + feature, mask=is_query & here, other=0.0).to(tl.float32)
    found += tl.load(to_key + feature, mask=is_key & here, other=0.0).to(tl.float32)
    found += tl.load(to_value + feature, mask=is_value & here, other=0.0).to(tl.float32)
    return found


@triton.jit
def _store_heads(
    target, known, first, second, rest, half, width, HALF: tl.constexpr, REST: tl.constexpr
):
    """Write both halves of the features that are turned, and the rest."""
    if HALF > 0:
        feature = tl.arange(0, HALF)[None, :]
        tl.store(target + feature, first, mask=known & (feature < half))
        tl.store(target + half + feature, second, mask=known & (feature < half))
    if REST > 0:
        other = 2 * half + tl.arange(0, REST)[None, :]
        tl.store(target + other, rest, mask=known & (other < width))


@triton.jit
def _turn_back(
    to_query,
    to_key,
    to_value,
    is_query,
    is_key,
    is_value,
    cos,
    sin,
    angle,
    half,
    width,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """Return the gradients of fused heads, see `_store_heads`; 0 where there are no such features."""
    first, second, rest = 0.0, 0.0, 0.0
    if HALF > 0:
        feature = tl.arange(0, HALF)[None, :]
        here = feature < half
        c, s = load_angles(cos, sin, angle, half, HALF)
        one = _load_gradients(to_query, to_key, to_value, is_query, is_key, is_value, feature, here)
        feature += half
        two = _load_gradients(to_query, to_key, to_value, is_query, is_key, is_value, feature, here)
        # The inverse of a turn is the turn by the opposite angle. Values are not turned.
        first = tl.where(is_value, one, one * c + two * s)
        second = tl.where(is_value, two, two * c - one * s)
    if REST > 0:
        other = 2 * half + tl.arange(0, REST)[None, :]
        here = other < width
        rest = _load_gradients(to_query, to_key, to_value, is_query, is_key, is_value, other, here)
    return first, second, rest


@triton.jit
def _gather(
    fused,
    query,
    key,
    value,
    cos,
    sin,
    sums,
    rows,
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
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """Gather gradients of some heads of ROWS positions; `sums` gets their sum, if it is not None."""
    tile, chunk = tl.program_id(0).to(tl.int64) // chunks, tl.program_id(0) % chunks
    head = chunk * HEADS + tl.arange(0, HEADS)[:, None]
    group, part, is_query, is_key, is_value = _kinds(head, heads, queries)
    query += (group * queries + part) * query_a
    key, value = key + group * key_a, value + group * value_a
    sum_first = tl.zeros([HEADS, HALF if HALF > 0 else 1], tl.float32)
    sum_second = tl.zeros([HEADS, HALF if HALF > 0 else 1], tl.float32)
    sum_rest = tl.zeros([HEADS, REST if REST > 0 else 1], tl.float32)
    for index in range(tile * ROWS, tl.minimum(tile * ROWS + ROWS, rows)):
        row = tl.cast(index, tl.int64)
        position, sample = row // samples, row % samples
        to_query = query + sample * query_b + position * query_s
        to_key = key + sample * key_b + position * key_s
        to_value = value + sample * value_b + position * value_s
        angle, to = sample * angle_b + position * angle_s, fused + (row * heads + head) * width
        parts = to_query, to_key, to_value, is_query, is_key, is_value
        first, second, rest = _turn_back(*parts, cos, sin, angle, half, width, HALF, REST)
        _store_heads(to, head < heads, first, second, rest, half, width, HALF, REST)
        sum_first, sum_second, sum_rest = sum_first + first, sum_second + second, sum_rest + rest
    if sums is not None:
        to = sums + (tile * heads + head) * width
        _store_heads(to, head < heads, sum_first, sum_second, sum_rest, half, width, HALF, REST)


def _split_or_views(fused: Tensor, tables: Tables | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of fused heads; values, and without tables all, are views."""
    if tables is None:
        return reference.split_heads(fused, None, None)
    s, b, groups, heads_per_group, d = fused.shape
    # As attention's result is then laid out: [s, b, a, d], as the next product reads it.
    query = fused.new_empty(s, b, groups * (heads_per_group - 2), d).permute(1, 2, 0, 3)
    key = fused.new_empty(s, b, groups, d).permute(1, 2, 0, 3)
    at_once = _heads_at_once(fused, _MOST_FEATURES)
    chunks = triton.cdiv(groups * heads_per_group, at_once)
    _split[(s * b * chunks,)](
        fused[:, :, :, :-1],  # what it reads, by the strides of the full tensor
        query,
        key,
        *tables,
        b,
        *_sizes(fused, tables),
        chunks,
        *(stride for part in (query, key) for stride in part.stride()[:3]),
        *_angle_strides(tables),
        **_blocks(fused, tables, at_once),
    )
    return query, key, fused[:, :, :, -1].permute(1, 2, 0, 3)


def _gather_gradients(
    fused: Tensor, grads: tuple[Tensor, ...], tables: Tables | None, *, sums: bool
) -> Tensor | None:
    """Write the gradient of the fused heads to `fused`; return its sum over positions if wanted."""
    s, b, groups, heads_per_group, d = fused.shape
    rows, heads, partial = s * b, groups * heads_per_group, None
    at_once, tile = _heads_at_once(fused, _SUMMED_FEATURES if sums else _MOST_FEATURES), 1
    if sums:
        block = at_once * triton.next_power_of_2(d)
        tile = tile_rows(rows, heads * triton.next_power_of_2(d), block, fused.device)
        shape = (triton.cdiv(rows, tile), heads * d)
        partial = torch.empty(shape, dtype=torch.float32, device=fused.device)
    chunks = triton.cdiv(heads, at_once)
    _gather[(triton.cdiv(rows, tile) * chunks,)](
        fused,
        *grads,
        *(tables or (None, None)),
        partial,
        rows,
        b,
        *_sizes(fused, tables),
        chunks,
        *(stride for part in grads for stride in part.stride()[:3]),
        *_angle_strides(tables),
        ROWS=tile,
        **_blocks(fused, tables, at_once),
    )
    return None if partial is None else partial.sum(0)


def _heads_at_once(fused: Tensor, most: int) -> int:
    """Return the heads of a program of `most` features."""
    heads, block = fused.size(2) * fused.size(3), triton.next_power_of_2(fused.size(4))
    return min(triton.next_power_of_2(heads), max(1, most // block))


def _half(tables: Tables | None) -> int:
    return 0 if tables is None else tables[0].size(-1)


def _sizes(fused: Tensor, tables: Tables | None) -> tuple[int, int, int, int]:
    """Return heads, queries of a group, features of a head, and half of those that are turned."""
    return fused.size(2) * fused.size(3), fused.size(3) - 2, fused.size(4), _half(tables)


def _angle_strides(tables: Tables | None) -> tuple[int, int]:
    return (0, 0) if tables is None else (sample_stride(tables[0]), tables[0].stride(-2))


def _blocks(fused: Tensor, tables: Tables | None, at_once: int) -> dict[str, int]:
    """Return the constants of a kernel of `at_once` heads."""
    half, rest = _half(tables), fused.size(4) - 2 * _half(tables)
    return {
        "HEADS": at_once,
        "HALF": triton.next_power_of_2(half) if half else 0,
        "REST": triton.next_power_of_2(rest) if rest else 0,
        "num_warps": warps(at_once * triton.next_power_of_2(fused.size(4))),
    }


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, fused: Tensor, bias: Tensor | None, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.shape = fused.shape
        ctx.bias_dtype = bias.dtype if bias is not None and ctx.needs_input_grad[1] else None
        return _split_or_views(fused, None if cos is None or sin is None else (cos, sin))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        grads = tuple(x if x.stride(-1) == 1 else x.contiguous() for x in grads)
        fused, tables = grads[0].new_empty(ctx.shape), ctx.saved_tensors
        total = _gather_gradients(
            fused, grads, None if tables[0] is None else tables, sums=ctx.bias_dtype is not None
        )
        return fused, None if total is None else total.to(ctx.bias_dtype), None, None


def split_heads(
    fused: Tensor, bias: Tensor | None, tables: Tables | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the result of the reference in 32 bits. No gradient for the angles."""
    if rotary_limit(fused.dtype, 1, fused.size(-1)):
        return reference.split_heads(fused, bias, tables)
    cos, sin = (None, None) if tables is None else (each.contiguous() for each in tables)
    query, key, value = _SplitHeads.apply(fused.contiguous(), bias, cos, sin)
    return query, key, value
