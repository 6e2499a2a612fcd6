"""The learning rate, against the contract's cases written out."""

import doctest
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.optim import schedule
from megatron.optim.schedule import learning_rate
from megatron.plan import model_spec
from megatron.plan.schedule_plan import SchedulePlan


def path(style, *, warmup=100, decay=1100, floor=0.1):
    return SchedulePlan(
        style=style, peak=1.0, floor=floor, warmup_samples=warmup, decay_samples=decay
    )


def contract(n, *, style, peak, floor, w, d):
    """The contract's table, row by row."""
    if w > 0 and n <= w:
        return peak * n / w
    if style == "constant":
        return peak
    if n > d:
        return floor
    r = (n - w) / (d - w)
    if style == "linear":
        return floor + (1 - r) * (peak - floor)
    return floor + 0.5 * (1 + math.cos(math.pi * r)) * (peak - floor)


@given(
    n=st.integers(0, 3000),
    style=st.sampled_from(["constant", "linear", "cosine"]),
    peak=st.floats(1e-6, 10),
    share=st.floats(0, 1),
    w=st.integers(0, 1000),
    span=st.integers(1, 1000),
)
def test_the_rate_is_that_of_the_contract(n, style, peak, share, w, span):
    plan = SchedulePlan(
        style=style, peak=peak, floor=share * peak, warmup_samples=w, decay_samples=w + span
    )
    expected = contract(n, style=style, peak=peak, floor=share * peak, w=w, d=w + span)
    assert learning_rate(n, plan) == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize(
    ("style", "rates"),
    [
        ("constant", [0, 0.5, 1, 1, 1, 1, 1]),
        ("linear", [0, 0.5, 1, 0.55, 0.1, 0.1, 0.1]),
        ("cosine", [0, 0.5, 1, 0.55, 0.1, 0.1, 0.1]),
    ],
)
def test_the_rate_at_the_corners(style, rates):
    corners = [0, 50, 100, 600, 1100, 1101, 10**9]
    assert [learning_rate(n, path(style)) for n in corners] == pytest.approx(rates)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_without_a_warm_up_the_first_step_has_the_peak(style):
    assert learning_rate(0, path(style, warmup=0)) == 1.0


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_the_rate_never_rises_after_the_warm_up(style):
    rates = [learning_rate(n, path(style)) for n in range(100, 1200)]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("module", [schedule, model_spec])
def test_the_examples_in_docstrings_hold(module):
    results = doctest.testmod(module)
    assert (results.failed, results.attempted > 0) == (0, True)
