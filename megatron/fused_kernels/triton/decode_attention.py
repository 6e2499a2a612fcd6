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
_FEWEST = 16  # rows and columns of a product on tensor cores
_MOST_KEYS = 64  # in registers at once
_MOST_REGISTERS = 128  # of a thread; without a limit ptxas spills a few for more programs at once
_BYTES_OF_4_WARPS = 4096  # of the queries of a key


@triton.jit
def _capped(scores, CAP: tl.constexpr):
    """Return CAP * tanh(scores / CAP), by the logistic function; the scores for a cap of 0."""
    if CAP > 0:
        scores = CAP * (2.0 * tl.sigmoid(2.0 * scores / CAP) - 1.0)
    return scores


@triton.jit
def _begin(
    q, key, value, keys, values, is_own, sinks, head, queries, width, scale, CAP: tl.constexpr
):
    """Store the new key and value, and attend to them and the sinks; nothing unless `is_own`.

    Returns the largest score, and the sums of weights and of weighted values.
    """
    feature = tl.arange(0, q.shape[1])[None, :]
    here = feature < width
    k = tl.load(key + feature, mask=here, other=0.0)
    v = tl.load(value + feature, mask=here, other=0.0)
    tl.store(keys + feature, k, mask=here & is_own)
    tl.store(values + feature, v, mask=here & is_own)
    score = _capped(tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale, CAP)
    largest, total = score, score * 0.0
    if sinks is not None:
        each = tl.arange(0, q.shape[0])
        sink = tl.load(sinks + head + each, mask=each < queries, other=0.0).to(tl.float32)
        largest = tl.maximum(score, sink)
        total = tl.exp(sink - largest)
    weight = tl.exp(score - largest)
    result = tl.where(is_own, weight[:, None] * v.to(tl.float32), 0.0)
    total = tl.where(is_own, total + weight, 0.0)
    return tl.where(is_own, largest, -float("inf")), total, result


@triton.jit
def _fold(
    q,
    keys,
    values,
    slope,
    start,
    stop,
    width,
    scale,
    largest,
    total,
    result,
    CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the same with the keys from `start` to `stop`, distances from the new one: online softmax."""
    feature = tl.arange(0, q.shape[1])[None, :]
    for first in range(start, stop, BLOCK):
        distance = first + tl.arange(0, BLOCK)
        tile = distance[:, None].to(tl.int64) * width + feature
        seen = (distance < stop)[:, None] & (feature < width)
        k = tl.load(keys + tile, mask=seen, other=0.0)
        scores = _capped(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, CAP)
        scores += slope * distance[None, :].to(tl.float32)
        scores = tl.where((distance < stop)[None, :], scores, -float("inf"))
        latest = tl.maximum(largest, tl.max(scores, 1))
        weights, decay = tl.exp(scores - latest[:, None]), tl.exp(largest - latest)
        v = tl.load(values + tile, mask=seen, other=0.0)
        total = total * decay + tl.sum(weights, 1)
        result = result * decay[:, None]
        result += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = latest
    return largest, total, result


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
    query_b,
    query_a,
    key_b,
    key_g,
    value_b,
    value_g,
    CAP: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Attend from a group's queries to `share` of a row's keys, its new one among them or not."""
    pair, split = tl.program_id(0), tl.program_id(1)
    row, group = (pair // groups).to(tl.int64), pair % groups
    member, feature = tl.arange(0, QUERIES)[:, None], tl.arange(0, WIDTH)[None, :]
    head, here = group * queries + member, (member < queries) & (feature < width)
    q = tl.load(query + row * query_b + head * query_a + feature, mask=here, other=0.0)
    position = tl.load(positions + row).to(tl.int32)
    own = ((row * groups + group) * capacity + position) * width
    key, value = key + row * key_b + group * key_g, value + row * value_b + group * value_g
    keys, values = keys + own, values + own
    start, stop = first + split * share - position, first + split * share + share - position
    is_own, at = (start <= 0) & (stop > 0), group * queries
    largest, total, result = _begin(
        q, key, value, keys, values, is_own, sinks, at, queries, width, scale, CAP
    )
    slope = 0.0
    if slopes is not None:
        slope = tl.load(slopes + head, mask=member < queries, other=0.0)
    start, stop = tl.maximum(start, 1 - window), tl.minimum(stop, 0)
    largest, total, result = _fold(
        q, keys, values, slope, start, stop, width, scale, largest, total, result, CAP, BLOCK
    )
    # A row may have no key in these splits.
    result = result / tl.where(total > 0.0, total, 1.0)[:, None]
    at = (split * (tl.num_programs(0) // groups) + row) * groups * queries + head
    tl.store(mixed + at * width + feature, result, mask=here)
    if logs is not None:
        tl.store(logs + at, (largest + tl.log(total))[:, None], mask=member < queries)


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
    options = _options(heads // groups, width, query.element_size())
    share, splits = _division(len(visible), rows * groups, options["BLOCK"], query.device)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    mixed, logs = out, None
    if splits > 1:
        mixed = torch.empty(splits, *out.shape, dtype=torch.float32, device=out.device)
        logs = torch.empty(splits, rows, heads, dtype=torch.float32, device=out.device)
    _attend[(rows * groups, splits)](
        query,
        key,
        value,
        *cache,
        positions_b,
        slopes_a,
        sinks_a,
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
        *(stride for x in (query, key, value) for stride in x.stride()[:2]),
        CAP=softcap,
        **options,
    )
    return out if logs is None else _merged(mixed, logs, out)


def _merged(mixed: Tensor, logs: Tensor, out: Tensor) -> Tensor:
    """Write the attention of all splits to `out`: see `_merge`."""
    splits, rows, heads = logs.shape
    width = out.size(-1)
    _merge[(rows * heads,)](
        mixed,
        logs,
        out,
        rows * heads,
        splits,
        width,
        SPLITS=triton.next_power_of_2(splits),
        WIDTH=triton.next_power_of_2(width),
        num_warps=1,
    )
    return out


def _options(queries: int, width: int, size: int) -> dict[str, int]:
    """Return sizes of tiles for numbers of `size` bytes, and limits of a program."""
    rows, columns = max(_FEWEST, triton.next_power_of_2(queries)), triton.next_power_of_2(width)
    columns = max(_FEWEST, columns)
    block = max(_FEWEST, min(_MOST_KEYS, _BLOCK_BYTES // (columns * size)))
    warps = 4 if rows * columns * size <= _BYTES_OF_4_WARPS else 8
    tiles = {"QUERIES": rows, "WIDTH": columns, "BLOCK": block}
    return {**tiles, "num_warps": warps, "maxnreg": _MOST_REGISTERS}


def _division(keys: int, programs: int, block: int, device: torch.device) -> tuple[int, int]:
    """Return how many keys a program takes, whole blocks, and how many programs share those of a row."""
    wanted = triton.cdiv(_PROGRAMS * num_multiprocessors(device), programs)
    splits = max(1, min(wanted, _MOST_SPLITS, keys // _FEWEST_KEYS))
    share = triton.cdiv(triton.cdiv(keys, splits), block) * block
    return share, triton.cdiv(keys, share)
