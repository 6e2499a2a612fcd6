"""Learning rate and weight decay, against the contract's cases written out."""

import doctest
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import problem
from scripts import forget_plugin
from tiny import tiny_plan

from megatron.common import registry
from megatron.config.network import layer_pattern
from megatron.config.optimization.lr_schedule import SchedulePlan
from megatron.optimizer import schedule
from megatron.optimizer.schedule import learning_rate, lr_decay, weight_decay


def path(style, *, warmup=100, decay=1100, floor=0.1, peak=1.0, init=0.0, anneal=0, fall=""):
    return SchedulePlan(
        unit="samples",
        style=style,
        init=init,
        peak=peak,
        floor=floor,
        warmup=warmup,
        decay=decay,
        anneal=anneal,
        anneal_style=fall,
        on_resume="equal",
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
    plan = path(style, peak=peak, floor=share * peak, warmup=w, decay=w + span)
    expected = contract(n, style=style, peak=peak, floor=share * peak, w=w, d=w + span)
    assert learning_rate(plan, samples=n, tokens=0) == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize(
    ("style", "rates"),
    [
        ("constant", [0, 0.5, 1, 1, 1, 1, 1]),
        ("linear", [0, 0.5, 1, 0.55, 0.1, 0.1, 0.1]),
        ("cosine", [0, 0.5, 1, 0.55, 0.1, 0.1, 0.1]),
        ("square-root", [0, 0.5, 1, 0.1 + 0.9 * 0.5**0.5, 0.1, 0.1, 0.1]),
    ],
)
def test_the_rate_at_the_corners(style, rates):
    corners = [0, 50, 100, 600, 1100, 1101, 10**9]
    assert [learning_rate(path(style), samples=n, tokens=0) for n in corners] == pytest.approx(
        rates
    )


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_without_a_warm_up_the_first_step_has_the_peak(style):
    assert learning_rate(path(style, warmup=0), samples=0, tokens=0) == 1.0


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_the_rate_never_rises_after_the_warm_up(style):
    rates = [learning_rate(path(style), samples=n, tokens=0) for n in range(100, 1200)]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize(("n", "rate"), [(0, 0.2), (50, 0.6), (100, 1.0)])
def test_the_warm_up_starts_where_it_is_told(n, rate):
    assert learning_rate(path("linear", init=0.2), samples=n, tokens=0) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("n", "rate"), [(100, 1), (400, 0.5), (900, 1 / 3), (1100, math.sqrt(1 / 11)), (1101, 0.1)]
)
def test_inverse_square_root_falls_with_the_root_of_what_was_consumed(n, rate):
    assert learning_rate(path("inverse-square-root"), samples=n, tokens=0) == pytest.approx(rate)


def test_inverse_square_root_stops_at_the_floor_and_needs_no_warm_up():
    assert learning_rate(path("inverse-square-root", floor=0.4), samples=900, tokens=0) == 0.4
    assert learning_rate(
        path("inverse-square-root", warmup=0), samples=4, tokens=0
    ) == pytest.approx(0.5)
    assert learning_rate(path("inverse-square-root", warmup=0), samples=0, tokens=0) == 1.0


FALLS = {
    "linear": lambda r: 1 - r,
    "cosine": lambda r: (1 + math.cos(math.pi * r)) / 2,
    "exponential": lambda r: 2 * 2**-r - 1,
    "minus_sqrt": lambda r: 1 - r**0.5,
}


@given(n=st.integers(0, 2000), fall=st.sampled_from([*FALLS]), anneal=st.integers(1, 1000))
def test_wsd_stays_at_the_peak_until_its_last_part(n, fall, anneal):
    rate = learning_rate(path("WSD", anneal=anneal, fall=fall), samples=n, tokens=0)
    if n <= 100:
        assert rate == pytest.approx(n / 100)
    elif n <= 1100 - anneal:
        assert rate == pytest.approx(1.0)
    elif n > 1100:
        assert rate == pytest.approx(0.1)
    else:
        r = (n - 1100 + anneal) / anneal
        assert rate == pytest.approx(0.1 + 0.9 * FALLS[fall](r))


@pytest.mark.parametrize(
    ("style", "decays"),
    [
        ("linear", [0.01, 0.0325, 0.055, 0.1, 0.1]),
        ("cosine", [0.01, 0.01 + 0.09 * (1 - math.cos(math.pi / 4)) / 2, 0.055, 0.1, 0.1]),
    ],
)
def test_weight_decay_moves_from_start_to_end(style, decays):
    flags = f"--start-weight-decay 0.01 --end-weight-decay 0.1 --weight-decay-incr-style {style}"
    plan = tiny_plan(*flags.split()).optimizer
    assert [weight_decay(n, plan, 400) for n in (0, 100, 200, 400, 401)] == pytest.approx(decays)


def test_weight_decay_is_constant_unless_said():
    plan = tiny_plan("--weight-decay", "0.3").optimizer
    assert {weight_decay(n, plan, 400) for n in (0, 200, 1000)} == {0.3}


@pytest.mark.parametrize("module", [schedule, layer_pattern])
def test_the_examples_in_docstrings_hold(module):
    results = doctest.testmod(module)
    assert (results.failed, results.attempted > 0) == (0, True)


@pytest.mark.parametrize("name", ["exponential", "minus_sqrt"])
def test_the_style_of_a_plugin_may_have_the_name_of_an_annealing(name):
    registry.SCHEDULES.register(name)(lr_decay(lambda progress: 0.25))
    try:
        assert learning_rate(path(name, floor=0.0), samples=600, tokens=0) == 0.25
    finally:
        forget_plugin("", registry.SCHEDULES, name)


def test_the_embedding_has_the_same_path_between_its_own_ends():
    plan = tiny_plan("--lr-warmup-iters", "2", "--min-lr", "0.02", "--decoupled-lr", "0.4").schedule
    own = plan.of_embeddings
    assert (own.peak, own.floor) == (0.4, 0.02)
    assert tiny_plan().schedule.of_embeddings is None
    assert learning_rate(own, samples=own.warmup, tokens=0) == 0.4
    assert learning_rate(own, samples=own.decay + 1, tokens=0) == 0.02


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--decoupled-min-lr 0.01", "--decoupled-min-lr … --decoupled-lr"),
        (
            "--decoupled-lr 0.1 --decoupled-min-lr 0.2",
            "--decoupled-min-lr 0.2 … --decoupled-lr 0.1",
        ),
        ("--decoupled-lr 0.05 --min-lr 0.06", "--min-lr 0.06 … --decoupled-lr 0.05"),
        ("--decoupled-lr 0", "--decoupled-lr 0 … more than 0"),
    ],
)
def test_a_learning_rate_of_the_embedding_that_cannot_be_is_refused(flags, message):
    with problem(message):
        tiny_plan(*flags.split())
