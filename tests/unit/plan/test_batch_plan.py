"""How batches are cut up and grow, against the ramp written out literally."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tiny import tiny_plan

from megatron.plan.batch_plan import BatchPlan


def ramp_plan(start, increment, samples, final, unit=1):
    return BatchPlan(
        micro_batch_size=unit,
        global_batch_size=final,
        data_parallel_size=1,
        ramp_start=start,
        ramp_increment=increment,
        ramp_samples=samples if start != final else 0,
    )


def literal_size(consumed, start, increment, samples, final):
    """gbs(c) = START + int(c / samples_per_increment) * INC, and the final one after SAMPLES."""
    if consumed > samples or start == final:
        return final
    samples_per_increment = Fraction(samples, (final - start) // increment)
    return start + int(consumed / samples_per_increment) * increment


def literal_iterations(train_samples, start, increment, samples, final):
    """One step at a time through the ramp; then whole steps of the rest."""
    iterations = consumed = 0
    while consumed <= samples:
        consumed += literal_size(consumed, start, increment, samples, final)
        iterations += 1
    return iterations + (train_samples - consumed) // final


ramps = st.tuples(
    st.integers(1, 40), st.integers(1, 16), st.integers(0, 20), st.integers(1, 3000)
).map(lambda r: (r[0], r[1], r[3], r[0] + r[1] * r[2]))  # start, increment, samples, final


@given(ramps, st.integers(0, 4000))
def test_the_size_at_a_sample_is_that_of_the_literal_formula(ramp, consumed):
    assert ramp_plan(*ramp).size_at(consumed) == literal_size(consumed, *ramp)


@given(ramps)
def test_the_size_rises_in_increments_from_start_to_final(ramp):
    start, increment, samples, final = ramp
    sizes = [ramp_plan(*ramp).size_at(consumed) for consumed in range(0, samples + 2)]
    assert (sizes[0] if samples else final, sizes[-1]) == (start if samples else final, final)
    assert all((after - before) % increment == 0 for before, after in pairwise(sizes))
    assert sizes == sorted(sizes)


@given(ramps, st.integers(0, 10_000))
def test_the_number_of_steps_is_that_of_the_literal_simulation(ramp, more):
    start, _, samples, final = ramp
    assume(start != final)
    train_samples = samples + final + more
    steps = ramp_plan(*ramp).iterations_for(train_samples)
    assert steps == literal_iterations(train_samples, *ramp)


@given(ramps, st.integers(0, 5000))
def test_as_many_steps_are_taken_as_fit_into_the_samples(ramp, train_samples):
    plan = ramp_plan(*ramp)
    consumed = steps = 0
    while consumed + plan.size_at(consumed) <= train_samples:
        consumed += plan.size_at(consumed)
        steps += 1
    assert plan.iterations_for(train_samples) == steps


def test_a_global_batch_is_cut_into_micro_batches_of_every_replica():
    batch = tiny_plan("--global-batch-size", "24", world_size=3).batch
    assert (batch.micro_batch_size, batch.data_parallel_size) == (2, 3)
    assert batch.num_micro_batches(batch.global_batch_size) == 4
    assert batch.num_micro_batches(6) == 1


def test_one_micro_batch_per_replica_when_no_global_size_is_said():
    assert tiny_plan(world_size=3).batch.global_batch_size == 6


def test_a_ramp_that_starts_at_its_end_is_none():
    flags = ["--global-batch-size", "8", "--rampup-batch-size", "8", "2", "100"]
    plan = tiny_plan(*flags, "--train-samples", "160", without=("--train-iters",))
    assert [plan.batch.size_at(samples) for samples in (0, 50, 200)] == [8, 8, 8]
    assert plan.training.train_iters == 20


@pytest.mark.parametrize(("samples", "iterations"), [(160, 20), (167, 20), (8, 1)])
def test_a_partial_last_batch_is_dropped(samples, iterations):
    flags = ["--global-batch-size", "8", "--train-samples", str(samples)]
    assert tiny_plan(*flags, without=("--train-iters",)).training.train_iters == iterations


@given(ramps, st.integers(0, 3000))
def test_the_samples_before_a_step_are_those_of_the_steps_before(ramp, iterations):
    plan = ramp_plan(*ramp)
    samples = 0
    for _ in range(iterations):
        samples += plan.size_at(samples)
    assert plan.samples_before(iterations) == samples
