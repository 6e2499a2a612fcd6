"""Triton kernels of attention in decode steps: a new token of each sequence attends to its cached tokens.

One kernel stores the new key and value and attends. Programs divide the cached keys of a sequence, so
that few sequences with long contexts occupy a GPU too (split keys); a second kernel merges their results.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.fused_kernels.triton.launch import num_multiprocessors

_FEWEST_KEYS = 256  # of a program, where keys are divided: fewer take less time than the merge
_MOST_SPLITS = 64
_PROGRAMS = 2  # on each multiprocessor, as far as dividing the keys is needed for that
_BLOCK_BYTES = 16384  # of the keys in shared memory at once
_FEWEST_ROWS = 16  # of a product on tensor cores
_BYTES_OF_4_WARPS = 4096  # of the queries of a key


@triton.jit
def _capped(scores, softcap, CAPPED: tl.constexpr):
    """Return softcap * tanh(scores / softcap), by the logistic function."""
    if CAPPED:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    return scores


@triton.jit
def _attend(
    query,
    key,
    value,
    keys,
    values,
    positions,
    slopes,
    sinks,
    mixed,
    logs,
    groups,
    queries,
    capacity,
    width,
    first,
    share,
    window,
    scale,
    softcap,
    query_b,
    query_a,
    key_b,
    key_g,
    value_b,
    value_g,
    CAPPED: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Attend from a group's queries to `share` of a row's keys, its new one among them or not."""
    pair, split = tl.program_id(0), tl.program_id(1)
    row, group = (pair // groups).to(tl.int64), pair % groups
    member, feature = tl.arange(0, QUERIES)[:, None], tl.arange(0, WIDTH)[None, :]
    head, is_feature = group * queries + member, feature < width
    here = (member < queries) & is_feature
    q = tl.load(query + row * query_b + head * query_a + feature, mask=here, other=0.0)
    new_k = tl.load(key + row * key_b + group * key_g + feature, mask=is_feature, other=0.0)
    new_v = tl.load(value + row * value_b + group * value_g + feature, mask=is_feature, other=0.0)
    position = tl.load(positions + row).to(tl.int32)
    start, stop = first + split * share, first + split * share + share
    is_own = (start <= position) & (position < stop)
    cached = (row * groups + group) * capacity * width
    own = cached + position * width + feature
    tl.store(keys + own, new_k, mask=is_feature & is_own)
    tl.store(values + own, new_v, mask=is_feature & is_own)
    score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1) * scale
    score = _capped(score, softcap, CAPPED)
    largest, total = score, tl.zeros([QUERIES], tl.float32)
    if SINKS:
        each = tl.arange(0, QUERIES)
        sink = tl.load(sinks + group * queries + each, mask=each < queries, other=0.0)
        largest = tl.maximum(score, sink.to(tl.float32))
        total = tl.exp(sink.to(tl.float32) - largest)
    weight = tl.exp(score - largest)
    largest = tl.where(is_own, largest, -float("inf"))
    total = tl.where(is_own, total + weight, 0.0)
    result = tl.where(is_own, weight[:, None] * new_v.to(tl.float32), 0.0)
    if ALIBI:
        slope = tl.load(slopes + head, mask=member < queries, other=0.0)
    stop = tl.minimum(stop, position)
    for begin in range(tl.maximum(start, position - window + 1), stop, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        tile = cached + column[:, None].to(tl.int64) * width + feature
        seen = (column < stop)[:, None] & is_feature
        k = tl.load(keys + tile, mask=seen, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = _capped(scores, softcap, CAPPED)
        if ALIBI:
            scores += slope * (column - position)[None, :].to(tl.float32)
        scores = tl.where((column < stop)[None, :], scores, -float("inf"))
        latest = tl.maximum(largest, tl.max(scores, 1))
        weights, decay = tl.exp(scores - latest[:, None]), tl.exp(largest - latest)
        v = tl.load(values + tile, mask=seen, other=0.0)
        total = total * decay + tl.sum(weights, 1)
        result = result * decay[:, None]
        result += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = latest
    # A row may have no key in these splits.
    result = result / tl.where(total > 0.0, total, 1.0)[:, None]
    at = (split * (tl.num_programs(0) // groups) + row) * groups * queries + head
    tl.store(mixed + at * width + feature, result, mask=here)
    if SPLIT:
        log = (largest + tl.log(total))[:, None]
        tl.store(logs + at, log, mask=member < queries)


@triton.jit
def _merge(mixed, logs, out, heads, splits, width, SPLITS: tl.constexpr, WIDTH: tl.constexpr):
    """Sum the results of all splits of a head, weighted by their shares of the softmax.

    Source: arXiv:2205.14135, section 3.1.
    """
    head = tl.program_id(0).to(tl.int64)
    each, feature = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    log = tl.load(logs + each * heads + head, mask=each < splits, other=-float("inf"))
    largest = tl.max(log, 0)
    result = tl.zeros([WIDTH], tl.float32)
    for split in range(splits):
        at = split * heads + head
        part = tl.load(mixed + at * width + feature, mask=feature < width, other=0.0)
        result += part * tl.exp(tl.load(logs + at) - largest)
    total = tl.sum(tl.exp(log - largest), 0)
    tl.store(out + head * width + feature, result / total, mask=feature < width)


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: tuple[Tensor, Tensor],
    positions_b: Tensor,
    visible: range,
    *,
    window: int,
    scale: float,
    softcap: float,
    slopes_a: Tensor | None,
    sinks_a: Tensor | None,
) -> Tensor:
    """Store the new key and value of each row and attend to its cached keys, in 32 bits.

    Args:
        visible: includes the positions of all keys that a row sees.
        window: a query sees no key that is this far from it, or farther; 0 for no limit.
        softcap: scores are softcap * tanh(score / softcap); 0 for none.
        slopes_a: of ALiBi.
        sinks_a: further scores of the softmax, whose weights no value gets.

    Shapes: query [b, a, 1, d], key and value [b, g, 1, d], where g divides a; cache two of
        [rows, g, capacity, d], contiguous; positions_b [b] int64 -> [b, a, 1, d].
    """
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    (rows, heads, _, width), groups = query.shape, key.size(1)
    queries = max(_FEWEST_ROWS, triton.next_power_of_2(heads // groups))
    features = max(16, triton.next_power_of_2(width))
    block = max(16, min(128, _BLOCK_BYTES // (features * key.element_size())))
    share, splits = _division(len(visible), rows * groups, block, query.device)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    mixed = logs = out
    if splits > 1:
        mixed = torch.empty(splits, *out.shape, dtype=torch.float32, device=out.device)
        logs = torch.empty(splits, rows, heads, dtype=torch.float32, device=out.device)
    _attend[(rows * groups, splits)](
        query,
        key,
        value,
        *cache,
        positions_b,
        out if slopes_a is None else slopes_a,
        out if sinks_a is None else sinks_a,
        mixed,
        logs,
        groups,
        heads // groups,
        cache[0].size(2),
        width,
        visible.start,
        share,
        window or visible.stop,
        scale,
        softcap,
        *(stride for x in (query, key, value) for stride in x.stride()[:2]),
        CAPPED=softcap > 0,
        ALIBI=slopes_a is not None,
        SINKS=sinks_a is not None,
        SPLIT=splits > 1,
        QUERIES=queries,
        WIDTH=features,
        BLOCK=block,
        num_warps=4 if queries * features * query.element_size() <= _BYTES_OF_4_WARPS else 8,
    )
    if splits > 1:
        most = triton.next_power_of_2(splits)
        _merge[(rows * heads,)](
            mixed, logs, out, rows * heads, splits, width, SPLITS=most, WIDTH=features, num_warps=1
        )
    return out


def _division(keys: int, programs: int, block: int, device: torch.device) -> tuple[int, int]:
    """Return how many keys a program takes, whole blocks, and how many programs share those of a row."""
    wanted = triton.cdiv(_PROGRAMS * num_multiprocessors(device), programs)
    splits = max(1, min(wanted, _MOST_SPLITS, keys // _FEWEST_KEYS))
    share = triton.cdiv(triton.cdiv(keys, splits), block) * block
    return share, triton.cdiv(keys, share)
