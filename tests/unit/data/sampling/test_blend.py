"""Data sets dealt out by weight."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problem

from megatron.common.errors import DataError
from megatron.data.sampling import blending
from megatron.data.sampling.blending import BlendedDataset, blend_order, samples_wanted
from megatron.data.sampling.provenance import Origin


def one_after_the_other(weights, num_samples):
    """Reference of the blending rule, sample by sample."""
    total = 0.0
    for weight in weights:
        total += weight
    shares = np.array([weight / total for weight in weights])
    shares /= np.sum(shares)
    taken = [0] * len(weights)
    order = []
    for i in range(num_samples):
        behind = [share * max(i, 1) - count for share, count in zip(shares, taken, strict=True)]
        source = behind.index(max(behind))
        order.append((source, taken[source]))
        taken[source] += 1
    return order


def pairs(order):
    return list(zip(order.sources[:].tolist(), order.samples[:].tolist(), strict=True))


some_weights = st.lists(
    st.one_of(
        st.floats(1e-9, 1), st.integers(1, 9).map(float), st.sampled_from([0.1, 0.2, 0.25, 1e-4])
    ),
    min_size=1,
    max_size=12,
)


@given(weights=some_weights, num_samples=st.integers(1, 3000))
@settings(max_examples=60, deadline=None)
def test_the_order_is_that_of_the_rule(weights, num_samples):
    assert pairs(blend_order(weights, num_samples)) == one_after_the_other(weights, num_samples)


@given(weights=some_weights, num_samples=st.integers(1, 3000))
@settings(max_examples=60, deadline=None)
def test_stretches_that_started_wrong_are_computed_again(weights, num_samples):
    """Short stretches without a way to forget: nearly all of them start wrong."""
    found = pairs(blend_order(weights, num_samples, warm_up=3, num_pieces=2))
    assert found == one_after_the_other(weights, num_samples)


@pytest.mark.parametrize("seed", range(3))
def test_long_orders_of_uneven_weights_are_those_of_the_rule(seed):
    weights = np.random.default_rng(seed).dirichlet(np.full(20, 0.2)).tolist()
    assert pairs(blend_order(weights, 30_000)) == one_after_the_other(weights, 30_000)


@pytest.mark.parametrize("count", [2, 100, 300])
def test_orders_of_few_and_many_sets_are_those_of_the_rule(count):
    weights = np.random.default_rng(count).random(count).tolist()
    assert pairs(blend_order(weights, 12_000)) == one_after_the_other(weights, 12_000)


def test_orders_with_some_equal_shares_are_those_of_the_rule():
    weights = [*np.random.default_rng(0).random(30).tolist(), 0.5, 0.5, 0.25, 0.1, 0.2, 0.3, 0.0]
    assert pairs(blend_order(weights, 20_000)) == one_after_the_other(weights, 20_000)


@pytest.mark.parametrize("top", [0, 0.6, 1.2])
def test_steps_whose_numbers_leave_their_range_are_exact_ones(top, monkeypatch):
    monkeypatch.setattr(blending, "_TOP", int(top * blending._ONE))
    weights = np.random.default_rng(1).random(40).tolist()
    assert pairs(blend_order(weights, 12_000)) == one_after_the_other(weights, 12_000)


def test_the_order_is_pinned_whatever_sum_rounds_to(monkeypatch):
    """Weights whose sum is another one in float64, one after the other, than rounded once."""
    weights = [0.2, 0.5, 0.2]
    with monkeypatch.context() as patch:
        patch.setattr("builtins.sum", math.fsum)  # more or less that of Python 3.12
        order, wanted = blend_order(weights, 18), samples_wanted(weights, 600)
    assert order.sources.tolist() == [1, 0, 2, 1, 1, 0, 2, 1, 1, 0, 1, 2, 1, 1, 0, 2, 1, 1]
    assert wanted == [135, 335, 135]


def test_equal_shares_take_turns():
    assert blend_order([1, 1, 1], 7).sources.tolist() == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(("count", "dtype"), [(300, np.int16), (33_000, np.int32)])
def test_there_may_be_any_number_of_data_sets(count, dtype):
    order = blend_order([1.0] * count, count + 2)
    assert order.sources.dtype == dtype
    assert sorted(order.sources[:count].tolist()) == list(range(count))


@given(
    weights=st.lists(st.floats(1e-6, 1), min_size=1, max_size=8), num_samples=st.integers(1, 500)
)
@settings(deadline=None)
def test_no_data_set_gives_more_than_is_planned_of_it(weights, num_samples):
    order = blend_order(weights, num_samples)
    given = np.bincount(order.sources, minlength=len(weights))
    assert (given <= samples_wanted(weights, num_samples)).all()


class Numbered:
    """Sample i is the tokens (name, i)."""

    def __init__(self, name, length):
        self.name, self.length = name, length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        if not 0 <= i < self.length:
            raise IndexError(i)
        return {"tokens": np.array([self.name, i])}

    def origin(self, i):
        return Origin(str(self.name), i, ())


def test_every_index_of_a_blend_exists(tmp_path):
    weights, num_samples = [0.001, 0.999], 1000
    needed = samples_wanted(weights, num_samples)
    blended = BlendedDataset(
        [Numbered(d, count) for d, count in enumerate(needed)],
        weights,
        num_samples=num_samples,
        num_needed=needed,
        prefix="c",
        cache_directory=tmp_path,
    )
    assert len(blended) == num_samples
    found = [tuple(blended[i]["tokens"].tolist()) for i in range(len(blended))]
    assert found == one_after_the_other(weights, num_samples)
    assert [blended.origin(i).sample for i in (0, 999)] == [found[0][1], found[999][1]]


def test_the_order_is_kept_on_disk(tmp_path):
    def blended(weights, num_samples):
        parts = [Numbered(d, 100) for d in range(2)]
        return BlendedDataset(
            parts,
            weights,
            num_samples=num_samples,
            num_needed=[num_samples] * 2,
            prefix=str(tmp_path / "c"),
        ).order

    first = blended([1, 2], 50)
    files = {file: file.stat().st_ino for file in (tmp_path / "c-index-cache").glob("*.npy")}
    assert len(files) == 2
    assert pairs(blended([1, 2], 50)) == pairs(first)
    assert all(file.stat().st_ino == number for file, number in files.items())
    for number, other in enumerate([([2, 1], 50), ([1, 2], 51)], start=2):
        blended(*other)
        assert len([*(tmp_path / "c-index-cache").glob("*.npy")]) == 2 * number


def test_too_short_a_part_is_refused(tmp_path):
    with problem("5 samples … 51", DataError):
        BlendedDataset(
            [Numbered(0, 5), Numbered(1, 51)],
            [1, 1],
            num_samples=100,
            num_needed=[51, 51],
            prefix="c",
        )


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [-1.0, 2.0]])
def test_weights_that_give_no_shares_are_refused(weights):
    with problem("weights … above 0", ValueError):
        blend_order(weights, 5)
