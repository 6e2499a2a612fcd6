"""How batches are cut up and grow, against the published ramp, rounding included."""

import random
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from problems import problem
from tiny import tiny_config, tiny_plan

from megatron.config.optimization.batch_size import BatchPlan, Progress, size_schedule_of
from megatron.config.plan.plan import resolve
from megatron.config.plan.validation import validate


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
    samples_per_increment = samples / ((final - start) // increment)
    return start + int(consumed / samples_per_increment) * increment


def literal_iterations(train_samples, start, increment, samples, final):
    """One step at a time through the ramp; then whole steps of the rest."""
    iterations = consumed = 0
    while consumed <= samples:
        consumed += literal_size(consumed, start, increment, samples, final)
        iterations += 1
    return iterations + (train_samples - consumed) // final


class PublishedRamp:
    """Micro-batches of a step as BigScience's Megatron-DeepSpeed counts them: with a memory."""

    def __init__(self, start, increment, samples, final, replicas):
        num_increments, rest = divmod(final - start, increment)
        assert not rest
        self.start, self.increment, self.final, self.replicas = start, increment, final, replicas
        self.ramp_samples = samples
        self.samples_per_increment = samples / num_increments
        self.update(0)

    def update(self, consumed_samples):
        if consumed_samples > self.ramp_samples:
            self.global_batch_size = self.final
        else:
            steps = int(consumed_samples / self.samples_per_increment)
            self.global_batch_size = self.start + steps * self.increment
            assert self.global_batch_size <= self.final
        self.num_micro_batches = self.global_batch_size // self.replicas

    def consume(self, consumed_samples):
        return consumed_samples + self.num_micro_batches * self.replicas


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


def test_a_boundary_that_the_published_division_rounds_down_is_met_a_step_later():
    plan = ramp_plan(16, 2, 5000, 44)
    consumed = plan.samples_before(118)
    assert (consumed, plan.size_at(consumed)) == (2500, 28)  # exact division says 30


def random_ramps():
    draw = random.Random(1)
    for _ in range(300):
        replicas = draw.choice([1, 2, 4])
        start, increment = draw.randint(1, 12) * replicas, draw.randint(1, 4) * replicas
        samples = draw.randint(20, 4000)
        yield (start, increment, samples, start + increment * draw.randint(1, 30)), replicas


def test_runs_take_the_steps_of_the_published_ramp():
    points = 0
    for ramp, replicas in random_ramps():
        plan, published = ramp_plan(*ramp, replicas), PublishedRamp(*ramp, replicas)
        _, _, samples, final = ramp
        consumed = iterations = 0
        while consumed <= samples + 2 * final:
            published.update(consumed)
            assert plan.size_at(consumed) == published.global_batch_size
            assert plan.num_micro_batches(plan.size_at(consumed)) == published.num_micro_batches
            assert plan.samples_before(iterations) == consumed
            consumed = published.consume(consumed)
            iterations += 1
            points += 1
    assert points > 5000


def test_boundaries_are_met_where_the_published_division_meets_them():
    """Every sample of an increment that is whole, and those around it."""
    points = rounded_down = 0
    for ramp, replicas in random_ramps():
        plan, published = ramp_plan(*ramp, replicas), PublishedRamp(*ramp, replicas)
        start, increment, samples, final = ramp
        num_increments = (final - start) // increment
        for taken in range(num_increments + 1):
            boundary, rest = divmod(taken * samples, num_increments)
            for consumed in range(max(0, boundary - 1), boundary + 2):
                published.update(consumed)
                assert plan.size_at(consumed) == published.global_batch_size
                points += 1
            rounded_down += not rest and plan.size_at(boundary) < start + taken * increment
    assert points > 5000
    assert rounded_down > 10


def test_bloom_and_gpt_3_ramp_alike_in_exact_arithmetic():
    for start, increment, samples, final in ((192, 16, 9_765_625, 2048), (32, 32, 6_000_000, 1536)):
        plan = ramp_plan(start, increment, samples, final)
        consumed = 0
        while consumed <= samples:
            taken = consumed * ((final - start) // increment) // samples
            assert plan.size_at(consumed) == start + taken * increment
            consumed += plan.size_at(consumed)


def test_a_global_batch_is_cut_into_micro_batches_of_every_replica():
    batch = tiny_plan("--global-batch-size", "24", world_size=3).batch
    assert (batch.micro_batch_size, batch.data_parallel_size) == (2, 3)
    assert batch.num_micro_batches(batch.global_batch_size) == 4
    assert batch.num_micro_batches(6) == 1


@pytest.mark.parametrize("flag", ["--gradient-accumulation-steps", "--gas"])
def test_accumulation_steps_set_the_global_batch_size(flag):
    batch = tiny_plan(flag, "5", world_size=3).batch
    assert (batch.global_batch_size, batch.num_micro_batches(30)) == (30, 5)
    both = tiny_plan(flag, "5", "--global-batch-size", "30", world_size=3).batch
    assert both == batch


def test_a_command_of_megatron_lm_1_takes_the_steps_of_that_program():
    flags = [
        "--batch-size",
        "4",
        "--warmup",
        "0.1",
        "--lr-decay-iters",
        "8",
        "--pipe-parallel-size",
        "2",
    ]
    plan = tiny_plan(*flags, world_size=4, without=("--micro-batch-size",))
    assert (plan.batch.micro_batch_size, plan.batch.global_batch_size) == (4, 8)
    assert (plan.schedule.warmup, plan.parallel.pipeline) == (pytest.approx(0.1 * 64), 2)


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


def test_a_ramp_is_checked_from_the_consumed_samples_on():
    flags = ["--global-batch-size", "8", "--rampup-batch-size", "2", "2", "24", "--train-samples"]
    config = tiny_config(*flags, "80", "--micro-batch-size", "1", without=("--train-iters",))
    for consumed in (0, 8, 16):
        with problem("on the way … multiple … 4"):
            validate(config, world_size=4, device="cpu", done=Progress(1, consumed, 0))
    valid = validate(config, world_size=4, device="cpu", done=Progress(1, 25, 0))
    assert valid.steps.batch.sizes_from(25) == range(8, 9, 2)
    decided = resolve(valid, vocab_size=256)
    # The first size that the replicas can take: DeepSpeed wants it to be a multiple.
    assert decided.deepspeed["train_batch_size"] == 4
    assert decided.deepspeed["gradient_accumulation_steps"] == 1


SEQ_LENGTH = 6  # of tiny_config
STEPS = ["--step-batch-size-schedule", "0:2 200:4,400:8"]
BY_SAMPLES = {"without": ("--train-iters",)}


def scheduled_plan(*flags, seq_length=6):
    """A schedule of tokens: 2 samples a step, 4 from sample 33 on, 8 from sample 66 on."""
    lengths = ("--train-samples", "200", "--seq-length", str(seq_length))
    return tiny_plan(*STEPS, *lengths, *flags, **BY_SAMPLES)


@pytest.mark.parametrize(
    ("samples", "size"),
    [(0, 2), (32, 2), (33, 4), (65, 4), (66, 8), (1000, 8)],
)
def test_a_step_schedule_sets_the_batch_size_by_tokens(samples, size):
    batch = scheduled_plan().batch
    assert batch.size_at(samples) == size
    assert (batch.global_batch_size, batch.scheduled_samples) == (8, 66)


def test_thresholds_of_a_step_schedule_depend_on_the_sequence_length():
    batch = scheduled_plan(seq_length=50).batch
    assert [batch.size_at(samples) for samples in (3, 4, 7, 8)] == [2, 4, 4, 8]


def test_a_step_schedule_takes_the_forms_of_megatron_lm():
    expected = ((0, 768), (1953, 1536), (610351562, 3000))
    for words in (["0:768 2M:1536 0.625t:3K"], ["0:768,0.625T:3k", "2M:1536"]):
        assert size_schedule_of(words, seq_length=1024) == expected


def test_thresholds_of_a_step_schedule_are_exact():
    assert size_schedule_of(["0:2 1.005M:4"], seq_length=1) == ((0, 2), (1_005_000, 4))


@given(st.integers(0, 200))
def test_the_samples_before_a_step_of_a_schedule_are_those_of_the_steps_before(iterations):
    batch = scheduled_plan().batch
    samples = 0
    for _ in range(iterations):
        samples += batch.size_at(samples)
    assert batch.samples_before(iterations) == samples
    assert batch.iterations_for(samples) == iterations


def test_the_length_of_a_run_counts_the_steps_of_its_schedule():
    # 17 steps of 2 samples, 8 of 4 (to sample 66), then 16 of 8: 6 samples are left.
    assert scheduled_plan().training.train_iters == 17 + 8 + 16
    tokens = tiny_plan(*STEPS, "--train-tokens", "1188", **BY_SAMPLES).training
    assert (tokens.train_iters, tokens.train_samples) == (17 + 8 + 17, 202)


def test_a_step_schedule_is_checked_from_the_consumed_samples_on():
    config = tiny_config(*STEPS, "--train-samples", "200", **BY_SAMPLES)
    with problem("batch size 2 … multiple … 4"):
        validate(config, world_size=2, device="cpu")
    steps = validate(config, world_size=2, device="cpu", done=Progress(1, 33, 0)).steps
    assert steps.batch.sizes_from(33) == [4, 8]
    assert steps.batch.sizes_from(34) == [4, 8]
    assert steps.batch.sizes_from(66) == [8]


@pytest.mark.parametrize(
    ("size", "iterations", "samples"),
    [(8, 12, 96), (4, 12, 72), (16, 12, 192)],
)
def test_a_resumed_run_with_another_batch_has_samples_to_its_last_iteration(
    size, iterations, samples
):
    flags = ("--train-iters", str(iterations), "--global-batch-size", str(size))
    training = validate(
        tiny_config(*flags), world_size=1, device="cpu", done=Progress(6, 48, 48 * SEQ_LENGTH)
    ).steps.training
    assert (training.train_iters, training.train_samples) == (iterations, samples)


@pytest.mark.parametrize(("size", "iterations"), [(8, 9), (4, 12), (16, 7)])
def test_a_resumed_run_with_another_batch_counts_the_steps_of_the_samples_that_are_left(
    size, iterations
):
    config = tiny_config(
        *("--train-samples", "72", "--global-batch-size", str(size)), without=("--train-iters",)
    )
    steps = validate(
        config, world_size=1, device="cpu", done=Progress(6, 48, 48 * SEQ_LENGTH)
    ).steps
    assert (steps.training.train_iters, steps.training.train_samples) == (iterations, 72)


@pytest.mark.parametrize(("size", "iterations"), [(8, 9), (4, 12), (16, 8)])
def test_a_resumed_run_with_another_batch_counts_the_steps_of_the_tokens_that_are_left(
    size, iterations
):
    config = tiny_config(
        *("--train-tokens", str(72 * SEQ_LENGTH), "--global-batch-size", str(size)),
        without=("--train-iters",),
    )
    done = Progress(6, 48, 48 * SEQ_LENGTH)
    training = validate(config, world_size=1, device="cpu", done=done).steps.training
    left = (iterations - 6) * size
    assert (training.train_iters, training.train_samples) == (iterations, 48 + left)
