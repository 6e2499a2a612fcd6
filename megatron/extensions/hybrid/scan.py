"""Linear recurrences over a sequence, in chunks: state-space duality (SSD), the gated delta rule.

Inside a chunk all tokens are computed at once, by matrix products; chunks follow each other by their
states. A chunk of one token is the step of the recurrence itself.

Letters: b sequences, h heads, c chunks, q positions of a chunk, n and p features.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.extensions.hybrid.pattern import CHUNK


class Decay(NamedTuple):
    """Factors between tokens of a chunk, its beginning and its end; 0 across documents.

    Args:
        within: from token j to token i of a chunk, [b, h, c, q, q], 0 for i < j.
        enter: from the state before the chunk to token i, [b, h, c, q].
        leave: from token j to the state after the chunk, [b, h, c, q].
        across: from the state before the chunk to that after it, [b, h, c].
    """

    within: Tensor
    enter: Tensor
    leave: Tensor
    across: Tensor


def in_chunks(x: Tensor, size: int) -> Tensor:
    """Cut [b, h, s, ...] into chunks, padded with zeros at the end: [b, h, c, size, ...]."""
    missing = -x.size(2) % size
    if missing:
        x = F.pad(x, (*(0, 0) * (x.dim() - 3), 0, missing))
    return x.unflatten(2, (-1, size))


def decays(log_decay: Tensor, first_bs: Tensor | None, size: int) -> Decay:
    """Return the products of decays inside of chunks.

    Differences of sums are formed before the exponential, which would overflow for one of them alone.

    Args:
        log_decay: logarithm of each token's decay, [b, h, s], not above 0.
        first_bs: position of the first token of each token's document; None for one document.
        size: of chunks.
    """
    sums = in_chunks(log_decay, size).cumsum(-1)
    positions = torch.arange(size, device=sums.device)
    sees_qq = positions[:, None] >= positions
    enters, leaves, crosses = (torch.ones((), dtype=torch.bool, device=sums.device),) * 3
    if first_bs is not None:
        first = first_bs[:, None]
        # Padding at the end belongs to the last document, whose state it leaves unchanged.
        first = torch.cat([first, first[..., -1:].expand(-1, -1, -first.size(2) % size)], 2)
        first = first.unflatten(2, (-1, size))
        last = first[..., -1]
        before = torch.cat([first[:, :, 0, :1], last[:, :, :-1]], 2)
        sees_qq = sees_qq & (first[..., :, None] == first[..., None, :])
        enters, leaves = first == before[..., None], first == last[..., None]
        crosses = before == last
    differences = sums[..., :, None] - sums[..., None, :]
    return Decay(
        within=differences.masked_fill(~sees_qq, -torch.inf).exp(),
        enter=sums.exp() * enters,
        leave=(sums[..., -1:] - sums).exp() * leaves,
        across=sums[..., -1].exp() * crosses,
    )


def state_space_scan(
    u: Tensor,
    log_decay: Tensor,
    key: Tensor,
    query: Tensor,
    *,
    before: Tensor | None = None,
    first_bs: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return y_t = S_t query_t with S_t = exp(log_decay_t) S_(t-1) + u_t key_t^T, and the last state.

    Args:
        key, query: B and C, of groups of consecutive heads.
        before: the state before the first token; None for zeros.
        first_bs: position of the first token of each token's document, before which states are zero.

    Shapes: u [b, h, s, p], log_decay [b, h, s], key and query [b, g, s, n], states [b, h, p, n] ->
        [b, h, s, p].
    Source: arXiv:2405.21060, section 6 and listing 1.
    """
    length, size, heads_per_group = u.size(2), min(chunk, u.size(2)), u.size(1) // key.size(1)
    decay = decays(log_decay, first_bs, size)
    u, key, query = (in_chunks(x, size) for x in (u, key, query))
    scores = (query @ key.mT).repeat_interleave(heads_per_group, 1) * decay.within
    key, query = (x.repeat_interleave(heads_per_group, 1) for x in (key, query))
    added = (u * decay.leave[..., None]).mT @ key
    state = torch.zeros_like(added[:, :, 0]) if before is None else before
    states = []
    for number in range(added.size(2)):
        states.append(state)
        state = decay.across[:, :, number, None, None] * state + added[:, :, number]
    earlier = query @ torch.stack(states, 2).mT * decay.enter[..., None]
    return (scores @ u + earlier).flatten(2, 3)[:, :, :length], state


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    before: Tensor | None = None,
    first_bs: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return o_t = S_t^T query_t, and the last state; each token replaces what the state has for its key.

    S_t = S' + key_t beta_t (value_t - S'^T key_t)^T with S' = exp(log_decay_t) S_(t-1).

    Args:
        before: the state before the first token; None for zeros.
        first_bs: position of the first token of each token's document, before which states are zero.

    Shapes: query and key [b, h, s, n], value [b, h, s, p], log_decay and beta [b, h, s], states
        [b, h, n, p] -> [b, h, s, p].
    Source: arXiv:2412.06464, section 3.3.
    """
    length, size = key.size(2), min(chunk, key.size(2))
    decay = decays(log_decay, first_bs, size)
    query, key, value, beta = (in_chunks(x, size) for x in (query, key, value, beta))
    weighted_key = key * beta[..., None]
    # What a token reads of earlier tokens of its chunk; the solution undoes these replacements.
    reads = (weighted_key @ key.mT * decay.within).tril(-1)
    written = torch.cat([value * beta[..., None], weighted_key * decay.enter[..., None]], -1)
    solved = torch.linalg.solve_triangular(reads, written, upper=False, unitriangular=True)
    values, keys = solved.split([value.size(-1), key.size(-1)], -1)
    scores = query @ key.mT * decay.within
    entering, leaving = query * decay.enter[..., None], (key * decay.leave[..., None]).mT
    shape = (*key.shape[:2], key.size(-1), value.size(-1))
    state = value.new_zeros(shape) if before is None else before
    outputs = []
    for number in range(key.size(2)):
        new = values[:, :, number] - keys[:, :, number] @ state
        outputs.append(entering[:, :, number] @ state + scores[:, :, number] @ new)
        state = decay.across[:, :, number, None, None] * state + leaving[:, :, number] @ new
    return torch.stack(outputs, 2).flatten(2, 3)[:, :, :length], state
