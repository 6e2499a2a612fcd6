"""Packing against an implementation that takes one pair at a time."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from problems import problem

from megatron.data.datasets.packed_dataset import pack


def packed_one_by_one(lengths, pairs, *, num_rows, row_length, seed):
    """Return the rows, as lists of pairs, by the rule in words."""
    rng = np.random.RandomState(seed)
    rows, open_row, used = [], [], 0
    while len(rows) < num_rows:
        order = np.arange(len(pairs))
        rng.shuffle(order)
        for k in order.tolist():
            if not 0 < lengths[k] <= row_length:
                continue
            if used + lengths[k] > row_length:
                rows.append(open_row)
                open_row, used = [], 0
            open_row.append(pairs[k])
            used += lengths[k]
    return rows


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=30).filter(
        lambda lengths: any(0 < n <= 8 for n in lengths)
    ),
    st.integers(0, 50),
    st.integers(1, 40),
    st.integers(0, 2**32 - 1),
)
def test_rows_are_those_of_one_pair_at_a_time(lengths, first, num_rows, seed):
    pairs = range(first, first + len(lengths))
    options = {"num_rows": num_rows, "row_length": 8, "seed": seed}
    packing = pack(np.array(lengths), pairs, **options)
    starts = packing.row_starts.tolist()
    rows = [
        packing.pair_order[start:stop].tolist()
        for start, stop in zip(starts[:-1], starts[1:], strict=True)
    ]
    assert rows == packed_one_by_one(lengths, pairs, **options)
    assert len(rows) >= num_rows
    assert all(rows)
    assert len(packing.pair_order) == starts[-1]


def test_pairs_of_which_none_fits_are_refused():
    with problem("3 tokens", ValueError):
        pack(np.array([4, 0, 9]), range(3), num_rows=1, row_length=3, seed=1)
