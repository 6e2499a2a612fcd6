"""Prefixes: where each may end, and that the draw depends on the sample alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.datasets.views import PrefixDataset
from megatron.data.sampling.provenance import Origin

EOD = 0


class Samples:
    """Samples written out."""

    def __init__(self, *rows):
        self.rows = [np.array(row) for row in rows]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"tokens": self.rows[i]}

    def origin(self, i):
        return Origin("corpus", i, ())


def documents_of(tokens):
    """Return (start, stop, ended) of the documents of `tokens`, found one token at a time."""
    found, start = [], 0
    for position, token in enumerate(tokens):
        if token == EOD:
            found.append((start, position + 1, True))
            start = position + 1
    return found + ([(start, len(tokens), False)] if start < len(tokens) else [])


@given(st.lists(st.integers(0, 3), min_size=2, max_size=20), st.integers(0, 2**40))
def test_each_document_has_one_prefix_of_a_length_that_it_may_have(row, seed):
    sample = PrefixDataset(Samples(row), eod=EOD, seed=seed)[0]
    ends = sample["prefix_ends"]
    assert sample["tokens"].tolist() == row
    for start, stop, ended in documents_of(row[:-1]):
        assert len(set(ends[start:stop].tolist())) == 1
        length, full = ends[start] - start, stop - start
        assert 1 <= length <= max(1, full - ended)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=20), st.integers(0, 2**32))
def test_documents_that_see_each_other_share_a_prefix(row, seed):
    ends = PrefixDataset(Samples(row), eod=None, seed=seed)[0]["prefix_ends"]
    assert len(set(ends[:-1].tolist())) == 1
    assert 1 <= ends[0] <= len(row) - 1


@pytest.mark.parametrize(
    ("row", "eod", "lengths"),
    [([1, 2, 3, 4, 5], None, {1, 2, 3, 4}), ([1, 2, 3, EOD, 5], EOD, {1, 2, 3})],
    ids=["a sample", "a document"],
)
def test_every_length_is_drawn_equally_often(row, eod, lengths):
    dataset = PrefixDataset(Samples(*[row] * 3000), eod=eod, seed=7)
    drawn = [int(dataset[i]["prefix_ends"][0]) for i in range(len(dataset))]
    assert set(drawn) == lengths
    for length in lengths:
        assert drawn.count(length) == pytest.approx(3000 / len(lengths), rel=0.1)


def test_the_draw_depends_on_the_seed_and_the_number_of_the_sample_alone():
    rows = [list(range(1, 40))] * 8

    def all_of(order, seed):
        dataset = PrefixDataset(Samples(*rows), eod=EOD, seed=seed)
        return {i: dataset[i]["prefix_ends"].tolist() for i in order}

    assert all_of(range(8), 1) == all_of(reversed(range(8)), 1)
    assert all_of(range(8), 1) != all_of(range(8), 2)
    assert len({str(row) for row in all_of(range(8), 1).values()}) > 1


def test_it_is_as_long_as_and_comes_from_what_it_is_put_over():
    dataset = PrefixDataset(Samples([1, 2], [3, 4]), eod=None, seed=1)
    assert len(dataset) == 2
    assert dataset.origin(1) == Origin("corpus", 1, ())
