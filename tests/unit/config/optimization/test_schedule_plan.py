"""The run's length and the learning rate's path, in samples."""

import pytest
from tiny import tiny_plan


def by_iters(*flags):
    return tiny_plan("--global-batch-size", "4", "--train-iters", "100", *flags)


def by_samples(*flags):
    ramp = ["--global-batch-size", "8", "--rampup-batch-size", "2", "2", "24"]
    return tiny_plan(*ramp, "--train-samples", "1000", *flags, without=("--train-iters",))


def test_a_run_of_steps_has_its_samples():
    training = by_iters("--exit-interval", "7", "--seed", "5").training
    assert (training.train_iters, training.train_samples) == (100, 400)
    assert (training.exit_interval, training.seed) == (7, 5)


def test_a_run_of_samples_has_its_steps():
    # 2 2 2 2 | 4 4 | 6 6 is 28, past the ramp's 24; then 8 at a time.
    training = by_samples().training
    assert (training.train_iters, training.train_samples) == (8 + (1000 - 28) // 8, 1000)


@pytest.mark.parametrize(
    ("flags", "path"),
    [
        ("", (0, 400)),
        ("--lr-decay-iters 50", (0, 200)),
        ("--lr-decay-iters 50 --lr-warmup-iters 5", (20, 200)),
        ("--lr-decay-iters 50 --lr-warmup-fraction 0.1", (20, 200)),
        ("--lr-warmup-fraction 0.333", (0.333 * 400, 400)),
        ("--lr-warmup-fraction 0.001", (0.4, 400)),
        ("--lr-warmup-fraction 0", (0, 400)),
        ("--lr-decay-iters 500", (0, 2000)),
    ],
)
def test_iterations_count_as_full_batches(flags, path):
    schedule = by_iters(*flags.split()).schedule
    assert (schedule.warmup, schedule.decay) == path
    assert schedule.unit == "samples"


@pytest.mark.parametrize(
    ("flags", "path"),
    [
        ("", (0, 1000)),
        ("--lr-decay-samples 700", (0, 700)),
        ("--lr-decay-samples 700 --lr-warmup-samples 5", (5, 700)),
        ("--lr-warmup-fraction 0.01", (10, 1000)),
    ],
)
def test_samples_count_as_they_are(flags, path):
    schedule = by_samples(*flags.split()).schedule
    assert (schedule.warmup, schedule.decay) == path
    assert schedule.unit == "samples"


def test_the_rest_of_the_path_is_as_asked():
    schedule = by_iters("--min-lr", "0.01", "--lr-decay-style", "cosine").schedule
    assert (schedule.style, schedule.peak, schedule.floor) == ("cosine", 0.1, 0.01)


@pytest.mark.parametrize(
    ("flags", "path"),
    [
        ("--lr-decay-tokens 1000", (0, 1000)),
        ("--lr-decay-tokens 1000 --lr-warmup-tokens 10", (10, 1000)),
        ("--lr-decay-tokens 1000 --lr-warmup-fraction 0.1", (100, 1000)),
        ("--lr-decay-tokens 1000 --lr-warmup-samples 5", (30, 1000)),
        ("--lr-warmup-tokens 10", (10, 6000)),
        ("--lr-warmup-tokens 10 --lr-decay-samples 50", (10, 300)),
    ],
)
def test_tokens_make_the_whole_path_one_over_tokens(flags, path):
    schedule = by_samples(*flags.split()).schedule
    assert (schedule.unit, schedule.warmup, schedule.decay) == ("tokens", *path)


def test_the_last_part_of_wsd_counts_like_the_rest():
    flags = "--lr-decay-style WSD --lr-wsd-decay-iters 30 --lr-wsd-decay-style linear"
    schedule = by_iters(*flags.split()).schedule
    assert (schedule.anneal, schedule.anneal_style) == (120, "linear")
    schedule = by_iters(*flags.split(), "--lr-decay-tokens", "2400").schedule
    assert schedule.anneal == 720


@pytest.mark.parametrize(
    ("flag", "choice"),
    [
        ("", "equal"),
        ("--override-lr-scheduler", "flags"),
        ("--override-opt_param-scheduler", "flags"),
        ("--use-checkpoint-lr-scheduler", "checkpoint"),
        ("--use-checkpoint-opt_param-scheduler", "checkpoint"),
    ],
)
def test_what_becomes_of_it_on_resume(flag, choice):
    assert by_iters(*flag.split()).schedule.on_resume == choice
