"""Proportions to ranges of documents."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import problem

from megatron.data.sampling.splits import split_ranges


@pytest.mark.parametrize(
    ("split", "size", "bounds"),
    [
        ("969, 30, 1", 1000, (0, 969, 999, 1000)),
        ("949,50,1", 1001, (0, 950, 1000, 1001)),
        ("98,2,0", 7, (0, 7, 7, 7)),
        ("98/2", 100, (0, 98, 100, 100)),
        ("1", 5, (0, 5, 5, 5)),
        ("1,1,1,7", 9, (0, 3, 6, 9)),
        ("0.9,0.1,0", 10, (0, 9, 10, 10)),
        ("0,1,1", 3, (0, 0, 1, 3)),
        ("969,30,1", 0, (0, 0, 0, 0)),
    ],
)
def test_bounds(split, size, bounds):
    train, valid, test = split_ranges(split, size)
    assert (train.start, train.stop, valid.stop, test.stop) == bounds
    assert (valid.start, test.start) == (train.stop, valid.stop)


def test_the_bounds_do_not_depend_on_how_sum_rounds(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("builtins.sum", math.fsum)  # more or less that of Python 3.12
        parts = split_ranges("0.1,0.2,0.3", 7)
    assert parts == (range(2), range(2, 4), range(4, 7))


@pytest.mark.parametrize("split", ["", "a,b", "90;10", "1,,1"])
def test_what_is_not_numbers_is_refused(split):
    with problem(f"--split '{split}' … 969,30,1"):
        split_ranges(split, 10)


@pytest.mark.parametrize("split", ["0", "0,0,0", "-1,2", "nan", "inf,1"])
def test_weights_without_meaning_are_refused(split):
    with problem(f"--split '{split}' … above 0"):
        split_ranges(split, 10)


@given(
    weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=4).filter(lambda w: sum(w[:3]) > 0),
    size=st.integers(0, 10**6),
    order=st.sampled_from(["bigscience", "megatron-core"]),
)
def test_the_parts_are_in_order_and_cover_everything(weights, size, order):
    train, valid, test = split_ranges(",".join(map(repr, weights)), size, order)
    assert 0 == train.start <= train.stop == valid.start <= valid.stop == test.start
    assert test.start <= test.stop == size
