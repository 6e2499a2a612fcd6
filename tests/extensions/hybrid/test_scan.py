"""Recurrences in chunks against the same, token by token; documents and states between passes."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from megatron.extensions.hybrid.scan import gated_delta_rule, state_space_scan

BATCH, HEADS, GROUPS, LENGTH, KEYS, VALUES = 2, 4, 2, 37, 5, 3
DOCUMENTS = ([0, 3, 4, 9, 16, 20, 31], [0, 8, 30])


def first_of_documents() -> Tensor:
    first_bs = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    for row, starts in zip(first_bs, DOCUMENTS, strict=True):
        for start in starts:
            row[start:] = start
    return first_bs


def by_token(query, key, values, log_decay, before, first_bs, *, write):
    """Compute a recurrence token by token: decay, write, read."""
    state, outputs = before, []
    for t in range(LENGTH):
        if t and first_bs is not None:
            state = state * (first_bs[:, t] != t)[:, None, None, None]
        state = log_decay[:, :, t, None, None].exp() * state
        state = state + key[:, :, t, :, None] * write(state, t)[:, :, None]
        outputs.append(torch.einsum("bhnp,bhn->bhp", state, query[:, :, t]))
    return torch.stack(outputs, 2), state


@pytest.fixture(params=["one document", "documents"])
def first_bs(request):
    return first_of_documents() if request.param == "documents" else None


@pytest.mark.parametrize("chunk", [1, 4, 8, 64])
@pytest.mark.parametrize("continues", [False, True])
def test_a_state_space_scan_is_its_recurrence(chunk, continues, first_bs):
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape):
        return torch.randn(BATCH, *shape, generator=generator, dtype=torch.float64)

    u, log_decay = numbers(HEADS, LENGTH, VALUES), -numbers(HEADS, LENGTH).abs()
    key, query = numbers(GROUPS, LENGTH, KEYS), numbers(GROUPS, LENGTH, KEYS)
    before = numbers(HEADS, VALUES, KEYS)
    found, state = state_space_scan(
        u,
        log_decay,
        key,
        query,
        before=before if continues else None,
        first_bs=first_bs,
        chunk=chunk,
    )
    keys, queries = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (key, query))
    start = before.mT if continues else torch.zeros_like(before.mT)
    expected, last = by_token(
        queries, keys, u, log_decay, start, first_bs, write=lambda _, t: u[:, :, t]
    )
    assert_close(found, expected)
    assert_close(state, last.mT)


@pytest.mark.parametrize("chunk", [1, 4, 8, 64])
@pytest.mark.parametrize("continues", [False, True])
def test_the_gated_delta_rule_is_its_recurrence(chunk, continues, first_bs):
    generator = torch.Generator().manual_seed(2)

    def numbers(*shape):
        return torch.randn(BATCH, HEADS, *shape, generator=generator, dtype=torch.float64)

    query, value = numbers(LENGTH, KEYS), numbers(LENGTH, VALUES)
    key = torch.nn.functional.normalize(numbers(LENGTH, KEYS), dim=-1)
    log_decay, beta = -numbers(LENGTH).abs(), numbers(LENGTH).sigmoid()
    before = numbers(KEYS, VALUES) if continues else None
    found, state = gated_delta_rule(
        query, key, value, log_decay, beta, before=before, first_bs=first_bs, chunk=chunk
    )

    def write(state, t):
        read = torch.einsum("bhnp,bhn->bhp", state, key[:, :, t])
        return beta[:, :, t, None] * (value[:, :, t] - read)

    start = torch.zeros_like(state) if before is None else before
    expected, last = by_token(query, key, value, log_decay, start, first_bs, write=write)
    assert_close(found, expected)
    assert_close(state, last)


def test_a_strong_decay_neither_overflows_nor_spreads_nan_in_32_bits():
    log_decay = torch.full((1, 1, 64), -40.0, requires_grad=True)
    u = torch.ones(1, 1, 64, 2, requires_grad=True)
    found, _ = state_space_scan(u, log_decay, torch.ones(1, 1, 64, 3), torch.ones(1, 1, 64, 3))
    found.sum().backward()
    assert_close(found, torch.full_like(found, 3.0))
    assert log_decay.grad.isfinite().all() and u.grad.isfinite().all()
