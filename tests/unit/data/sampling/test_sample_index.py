"""Megatron's sample order, against a second implementation that walks token by token."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron.data.sampling import sample_index
from megatron.data.sampling.sample_index import build_sample_index, plan_epochs


def maps_by_loops(sizes, documents, *, num_samples, seq_length, seed):
    """Build the three maps step by step, as Megatron-LM describes them."""
    tokens_per_epoch = sum(int(sizes[document]) for document in documents)
    num_epochs = 1
    while (num_epochs * tokens_per_epoch - 1) // seq_length < num_samples:
        num_epochs += 1
    total = (num_epochs * tokens_per_epoch - 1) // seq_length
    early = total
    if num_epochs > 1:
        before_last = ((num_epochs - 1) * tokens_per_epoch - 1) // seq_length
        if num_samples - before_last < int(0.95 * ((tokens_per_epoch - 1) // seq_length)):
            early = before_last
    rng = np.random.RandomState(seed)

    epochs_at_once = [num_epochs] if early == total else [num_epochs - 1, 1]
    document_order = []
    for count in epochs_at_once:
        part = np.array([document for _ in range(count) for document in documents], np.int64)
        rng.shuffle(part)
        document_order += part.tolist()

    starts = [(0, 0)]
    position, offset = 0, 0
    for _ in range(total):
        remaining = seq_length + 1
        while remaining:
            left = int(sizes[document_order[position]]) - offset
            if remaining <= left:
                offset += remaining - 1
                remaining = 0
            else:
                remaining -= left
                position, offset = position + 1, 0
        starts.append((position, offset))

    sample_order = []
    for first, last in ((0, early), (early, total)):
        part = np.arange(first, last)
        rng.shuffle(part)
        sample_order += part.tolist()
    return document_order, starts, sample_order, early < total


def both(sizes, documents, *, num_samples, seq_length, seed):
    sizes = np.array(sizes, np.int32)
    tokens = int(sizes[documents.start : documents.stop].sum())
    epochs = plan_epochs(tokens, num_samples=num_samples, seq_length=seq_length)
    built = build_sample_index(sizes, documents, epochs, seq_length=seq_length, seed=seed)
    expected = maps_by_loops(
        sizes, documents, num_samples=num_samples, seq_length=seq_length, seed=seed
    )
    return built, expected, epochs


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=25),
    cut=st.tuples(st.integers(0, 24), st.integers(0, 24)),
    num_samples=st.integers(0, 80),
    seq_length=st.integers(1, 30),
    seed=st.integers(0, 2**32 - 1),
    chunk=st.sampled_from([1, 3, 1 << 18]),
)
@settings(max_examples=400, deadline=None)
def test_maps_are_those_of_the_loops(sizes, cut, num_samples, seq_length, seed, chunk):
    documents = range(min(cut), min(max(cut) + 1, len(sizes)))
    assume(sum(sizes[document] for document in documents) > seq_length)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_index, "_CHUNK", chunk)
        built, expected, epochs = both(
            sizes, documents, num_samples=num_samples, seq_length=seq_length, seed=seed
        )
    document_order, starts, sample_order, is_separate = expected
    assert built.document_order.tolist() == document_order
    assert [tuple(row) for row in built.sample_starts.tolist()] == starts
    assert built.sample_order.tolist() == sample_order
    assert epochs.has_separate_last == is_separate
    assert epochs.num_samples == len(sample_order) >= num_samples


@pytest.mark.parametrize(
    ("num_samples", "num_epochs", "is_separate"),
    [(9, 1, False), (10, 2, True), (16, 2, True), (17, 2, False), (19, 2, False), (20, 3, True)],
)
def test_the_last_epoch_is_apart_when_little_of_it_is_wanted(num_samples, num_epochs, is_separate):
    """An epoch has 9 samples, and 95% of them are 8."""
    built, expected, epochs = both(
        [10] * 10, range(10), num_samples=num_samples, seq_length=10, seed=3
    )
    assert (epochs.num_epochs, epochs.has_separate_last) == (num_epochs, is_separate)
    assert (built.document_order.tolist(), built.sample_order.tolist()) == (
        expected[0],
        expected[2],
    )
    last_epoch = built.document_order[-10:].tolist()
    assert (sorted(last_epoch) == list(range(10))) == (is_separate or num_epochs == 1)


def test_more_samples_than_the_last_epoch_adds_are_planned():
    """One sample more than an epoch alone has, which Megatron refuses."""
    assert plan_epochs(11, num_samples=5, seq_length=4).num_samples == 5


def test_the_order_is_pinned():
    """Runs continued with another version of this code, or of numpy, need the same numbers."""
    built, _, _ = both([5, 3, 9, 1], range(4), num_samples=6, seq_length=4, seed=1234)
    assert built.document_order.tolist() == [0, 1, 2, 3, 1, 2, 3, 0]
    assert built.sample_order.tolist() == [0, 2, 3, 1, 7, 4, 6, 5]
    assert (built.document_order.dtype, built.sample_order.dtype) == (np.int32, np.uint32)
