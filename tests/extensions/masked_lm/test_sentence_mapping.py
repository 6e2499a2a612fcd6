"""Sentence mapping: rows equal to those of Megatron's helper, and what documents give none."""

from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problem
from sentence_corpora import thousand_documents

from megatron.extensions.masked_lm import data_mapping as sentence_mapping
from megatron.extensions.masked_lm.data_mapping import (
    NoUsableDocument,
    build_sentence_mapping,
    count_unused,
    has_usable_document,
)
from megatron.extensions.masked_lm.mersenne_twister import mt19937_64, shuffled_order

STARTS = np.array([0, 3, 4, 4, 11, 23, 25, 30, 34])
SIZES = np.array([5 + (37 * i) % 41 for i in range(34)], np.int32)
MANY = 10**6


def with_long(*lengths):
    sizes = SIZES.copy()
    for i, length in lengths:
        sizes[i] = length
    return sizes


def build(sizes, starts, max_epochs, num_samples, max_length, prob, seed, fewest):
    return build_sentence_mapping(
        sizes,
        starts,
        num_samples=num_samples,
        max_length=max_length,
        short_seq_prob=prob,
        seed=seed,
        min_sentences=fewest,
        max_epochs=max_epochs,
    ).rows


def digest(array):
    return sha256(array.tobytes()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("sizes", "arguments", "count", "hashed"),
    [
        (SIZES, (1, MANY, 61, 0.1, 1234, 2), 11, "09bd883d12900b50"),
        (SIZES, (1, MANY, 61, 0.0, 1234, 2), 11, "09bd883d12900b50"),
        (SIZES, (1, MANY, 61, 0.5, 1234, 1), 15, "6cb037e2b4a0dff9"),
        (SIZES, (MANY, 20, 61, 0.1, 1234, 2), 22, "727216a8dd5b0cc4"),
        (SIZES, (MANY, 1000, 61, 0.1, 1234, 1), 1011, "d66c1929871258d0"),
        (with_long((6, 513), (3, 600)), (1, MANY, 61, 0.1, 1234, 1), 10, "ff632fc181d03e4b"),
        (with_long((6, 513), (3, 600)), (1, MANY, 61, 0.1, 1234, 2), 9, "735c01a1f8910435"),
        (with_long((6, 512)), (1, MANY, 61, 0.1, 1234, 2), 11, "09bd883d12900b50"),
    ],
)
def test_rows_of_a_small_corpus_are_those_of_megatron(sizes, arguments, count, hashed):
    rows = build(sizes, STARTS, *arguments)
    assert rows.dtype == np.uint32
    assert (len(rows), digest(rows)) == (count, hashed)


@pytest.mark.parametrize("chunk", [300, 1 << 18])
@pytest.mark.parametrize(
    ("arguments", "count", "hashed"),
    [
        ((MANY, 5000, 509, 0.1, 1234, 2), 5832, "e49a412c35af77de"),
        ((MANY, 50000, 509, 0.1, 1234, 2), 50245, "9ecc72669e523005"),
        ((MANY, 5000, 510, 0.1, 1234, 1), 6049, "724c57a9770d10e9"),
        ((MANY, 5000, 125, 0.1, 42, 2), 5534, "0a6001dbab00033d"),
        ((3, 1 << 60, 509, 0.25, 1, 1), 3823, "ae4d3eba7d9600f8"),
        ((MANY, 5000, 125, 0.1, 1234, 2), 5532, "6e409d7a19cb779a"),
        ((MANY, 5000, 125, 0.1, 1234, 1), 5641, "0f716b29f46be697"),
        ((MANY, 5000, 126, 0.1, 1234, 1), 5616, "17e068e8224ea787"),
    ],
)
def test_rows_are_those_of_megatron_however_documents_are_taken(
    chunk, arguments, count, hashed, monkeypatch
):
    monkeypatch.setattr(sentence_mapping, "_CHUNK", chunk)
    rows = build(*thousand_documents(), *arguments)
    assert (len(rows), digest(rows)) == (count, hashed)


def draws_by_the_book(seed):
    """std::mt19937 by its definition."""
    state = [seed]
    for i in range(1, 624):
        state.append((1812433253 * (state[-1] ^ (state[-1] >> 30)) + i) & 0xFFFFFFFF)
    while True:
        for k in range(624):
            y = (state[k] & 0x80000000) | (state[(k + 1) % 624] & 0x7FFFFFFF)
            state[k] = state[(k + 397) % 624] ^ (y >> 1) ^ (0x9908B0DF if y & 1 else 0)
        for y in state:
            y ^= y >> 11
            y ^= (y << 7) & 0x9D2C5680
            y ^= (y << 15) & 0xEFC60000
            yield y ^ (y >> 18)


def rows_by_the_book(sizes, starts, samples, length, ratio, seed, fewest):
    """The mapping, sentence by sentence, before it is shuffled."""
    draws, rows = draws_by_the_book(seed), []

    def target():
        if not ratio:
            return length
        draw = next(draws)
        return length if draw % ratio else 2 + draw % (length - 1)

    while len(rows) < samples:
        for first, last in zip(starts[:-1], starts[1:], strict=True):
            of_document = sizes[first:last]
            if last - first < fewest or (last - first > 1 and max(of_document) > 512):
                continue
            wanted, total, start = target(), 0, first
            for i in range(first, last):
                total += sizes[i]
                left = last - i - 1
                if left == 0 or (total >= wanted and left > 1 and i + 1 - start >= fewest):
                    rows.append([start, i + 1, wanted])
                    start, total, wanted = i + 1, 0, target()
    return rows


@settings(deadline=None, max_examples=60)
@given(
    documents=st.lists(
        st.lists(st.integers(0, 40) | st.just(513), max_size=9), min_size=1, max_size=30
    ),
    samples=st.integers(1, 200),
    length=st.integers(2, 60),
    prob=st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.5, 0.7, 1.0]),
    seed=st.integers(1, 1 << 31),
    fewest=st.sampled_from([1, 2]),
)
def test_rows_equal_a_walk_over_every_sentence(documents, samples, length, prob, seed, fewest):
    sizes = np.array([size for each in documents for size in each], np.int32)
    starts = np.concatenate([[0], np.cumsum([len(each) for each in documents])]).astype(np.int64)
    if not has_usable_document(sizes, starts, fewest):
        with pytest.raises(NoUsableDocument):
            build(sizes, starts, MANY, samples, length, prob, seed, fewest)
        return
    ratio = {0.0: 0, 0.01: 100, 0.1: 10, 0.3: 3, 0.5: 2, 0.7: 1, 1.0: 1}[prob]
    expected = rows_by_the_book(
        sizes.tolist(), starts.tolist(), samples, length, ratio, seed, fewest
    )
    rows = build(sizes, starts, MANY, samples, length, prob, seed, fewest)
    order = list(range(len(expected)))
    draws = iter(mt19937_64(seed + 1, len(expected)).tolist())
    for i in range(len(expected) - 1, 0, -1):
        j = next(draws) % (i + 1)
        order[i], order[j] = order[j], order[i]
    assert rows.tolist() == [expected[i] for i in order]


def test_the_64_bit_generator_is_that_of_cpp():
    # The standard's own check: the 10000th output of the default seed.
    assert mt19937_64(5489, 10000)[-1] == 9981545732273789042
    assert shuffled_order(3, 1).tolist() == [0]
    assert sorted(shuffled_order(3, 1000).tolist()) == list(range(1000))


def test_a_corpus_without_a_usable_document_is_counted_and_ends():
    sizes = np.array([5, 600, 7, 9], np.int32)
    starts = np.array([0, 1, 1, 3, 4])
    with problem("1 without … 2 with fewer … 1 with", NoUsableDocument):
        build(sizes, starts, 2**31, 1 << 40, 61, 0.1, 1234, 2)
    assert vars(count_unused(sizes, starts, 1)) == {"empty": 1, "short": 0, "long": 1}
