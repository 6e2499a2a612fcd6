"""Rates of whole runs, from their flags, against the published schedulers written out."""

import json
import math
import random

import pytest
from tiny import tiny_plan

from megatron.checkpointing.train_state import TrainState
from megatron.optimizer.schedule import learning_rate, weight_decay
from megatron.training.run import schedule_of


def published_rate(n, *, style, init, peak, floor, warmup, decay, anneal=0, fall=""):
    """Return the learning rate of Megatron-LM's scheduler, and of BigScience's with init 0."""
    if warmup > 0 and n <= warmup:
        return init + (peak - init) * float(n) / float(warmup)
    if style == "constant":
        return peak
    if n > decay:
        return floor
    if style == "inverse-square-root":
        return max(floor, peak * max(warmup, 1) ** 0.5 / max(n, 1) ** 0.5)
    ratio = float(n - warmup) / float(decay - warmup)
    if style == "linear":
        share = 1.0 - ratio
    elif style == "cosine":
        share = 0.5 * (math.cos(math.pi * ratio) + 1.0)
    elif n <= decay - anneal:
        share = 1.0
    else:
        part = float(n - (decay - anneal)) / float(anneal)
        share = {
            "linear": 1.0 - part,
            "cosine": 0.5 * (math.cos(math.pi * part) + 1.0),
            "exponential": (2.0 * math.pow(0.5, part)) - 1.0,
            "minus_sqrt": 1.0 - math.sqrt(part),
        }[fall]
    return floor + share * (peak - floor)


def random_run(draw):
    """Return flags of a run, and what the published scheduler is built from."""
    batch, iterations = 2 * draw.randint(1, 8), draw.randint(4, 90)
    peak = draw.choice([0.1, 6e-5, draw.uniform(1e-5, 1)])
    floor = draw.choice([0.0, peak / 10, peak])
    style = draw.choice(["constant", "linear", "cosine", "inverse-square-root", "WSD"])
    decay_iters = draw.choice([None, draw.randint(3, 120)])
    decay = (decay_iters or iterations) * batch
    init = draw.choice([0.0, peak / 7])
    flags = [
        *("--lr", repr(peak), "--min-lr", repr(floor), "--lr-decay-style", style),
        *("--global-batch-size", str(batch), "--train-iters", str(iterations)),
        *("--lr-warmup-init", repr(init)),
    ]
    flags += ["--lr-decay-iters", str(decay_iters)] if decay_iters else []
    kind = draw.choice(["none", "fraction", "small", "iters"])
    warmup = 0
    if kind in ("fraction", "small"):
        fraction = draw.uniform(0, 0.6) if kind == "fraction" else draw.uniform(0, 1 / decay)
        warmup = fraction * decay
        flags += ["--lr-warmup-fraction", repr(fraction)]
    elif kind == "iters":
        warmup = draw.randint(0, decay // batch - 1) * batch
        flags += ["--lr-warmup-iters", str(warmup // batch)]
    run = {"style": style, "init": init, "peak": peak, "floor": floor}
    run |= {"warmup": warmup, "decay": decay}
    most = math.floor((decay - warmup) / batch)
    if style == "WSD" and most:
        anneal, fall = draw.randint(1, most), draw.choice(["linear", "cosine", "minus_sqrt"])
        fall = draw.choice([fall, "exponential"])
        flags += ["--lr-wsd-decay-iters", str(anneal), "--lr-wsd-decay-style", fall]
        run |= {"anneal": anneal * batch, "fall": fall}
    elif style == "WSD":
        return random_run(draw)
    return flags, run, batch, iterations


@pytest.mark.parametrize("seed", range(4))
def test_every_step_of_a_run_has_the_published_rate(seed):
    draw = random.Random(seed)
    for _ in range(40):
        flags, run, batch, iterations = random_run(draw)
        schedule = schedule_of(tiny_plan(*flags, without=("--lr", "--train-iters")))
        for iteration in range(iterations + 3):
            rate = schedule.lr(TrainState(iteration=iteration, samples=iteration * batch))
            expected = published_rate(iteration * batch, **run)
            assert rate == pytest.approx(expected, rel=1e-12, abs=1e-18), (flags, iteration)


def test_runs_in_samples_with_a_growing_batch_have_the_published_rates():
    draw = random.Random(9)
    for _ in range(40):
        increments, decay = draw.randint(1, 8), draw.randint(100, 900)
        final = 4 + 2 * increments
        warmup = draw.choice([0, draw.randint(1, 90), draw.uniform(0, 0.5)])
        flags = [
            *("--train-samples", "700", "--global-batch-size", str(final)),
            *("--rampup-batch-size", "4", "2", str(draw.randint(20, 400))),
            *("--lr-decay-samples", str(decay), "--lr-decay-style", "cosine", "--min-lr", "0.01"),
        ]
        name = "--lr-warmup-samples" if isinstance(warmup, int) else "--lr-warmup-fraction"
        flags += [name, repr(warmup)]
        plan = tiny_plan(*flags, without=("--train-iters",))
        schedule, samples = schedule_of(plan), 0
        run = {"style": "cosine", "init": 0.0, "peak": 0.1, "floor": 0.01, "decay": decay}
        run["warmup"] = warmup if isinstance(warmup, int) else warmup * decay
        for iteration in range(plan.training.train_iters):
            rate = schedule.lr(TrainState(iteration=iteration, samples=samples))
            assert rate == pytest.approx(published_rate(samples, **run), rel=1e-12), flags
            samples += schedule.batch_size(samples)


def test_a_warm_up_of_less_than_a_sample_still_starts_at_its_first_rate():
    flags = ("--train-iters", "40", "--lr-warmup-fraction", "0.01", "--global-batch-size", "2")
    plan = tiny_plan(*flags)
    assert plan.schedule.warmup == 0.8
    assert learning_rate(plan.schedule, samples=0, tokens=0) == 0


def test_a_warm_up_of_a_fraction_is_not_cut_to_whole_samples():
    flags = ("--lr-warmup-fraction", "0.01", "--global-batch-size", "2", "--lr", "1e-3")
    plan = tiny_plan("--train-iters", "320", *flags)
    assert plan.schedule.warmup == pytest.approx(6.4)
    assert learning_rate(plan.schedule, samples=6, tokens=0) == pytest.approx(9.375e-4)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_weight_decay_is_that_of_the_published_ramp(style):
    draw = random.Random(style)
    for _ in range(30):
        start = draw.uniform(0, 0.1)
        end = start if style == "constant" else start + draw.uniform(0, 0.2)
        iterations, batch = draw.randint(1, 60), 2 * draw.randint(1, 6)
        flags = [
            *("--start-weight-decay", repr(start), "--end-weight-decay", repr(end)),
            *("--weight-decay-incr-style", style, "--global-batch-size", str(batch)),
            *("--train-iters", str(iterations)),
        ]
        if style == "constant":
            flags[:4] = ["--weight-decay", repr(start)]
        plan = tiny_plan(*flags, without=("--train-iters",))
        total = iterations * batch
        for n in range(0, total + 2 * batch, batch):
            ratio = float(n) / float(total)
            share = {
                "constant": 0.0,
                "linear": ratio,
                "cosine": 0.5 * (math.cos(math.pi * (1 - ratio)) + 1.0),
            }[style]
            expected = end if n > total else start + share * (end - start)
            found = weight_decay(n, plan.optimizer, plan.training.train_samples)
            assert found == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.fixture
def curriculum(tmp_path):
    """The file of a curriculum whose sequences grow from 2 to 6 tokens over 12 steps."""
    file = tmp_path / "ds.json"
    block = {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 2,
        "max_difficulty": 6,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 12, "difficulty_step": 1},
    }
    file.write_text(json.dumps({"curriculum_learning": block}))
    return str(file)


@pytest.mark.parametrize("warmup", [8, 10, 11, 40, 60])
@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_tokens_decay_after_a_warm_up_of_samples(curriculum, warmup, style):
    """As BigScience's: sequences that grow do not stretch the warm-up."""
    flags = (
        *("--train-samples", "200", "--global-batch-size", "4", "--deepspeed_config", curriculum),
        *("--lr-decay-tokens", "900", "--lr-warmup-samples", str(warmup)),
        *("--lr-decay-style", style, "--min-lr", "0.01"),
    )
    plan = tiny_plan(*flags, without=("--train-iters",))
    rate = schedule_of(plan).lr
    samples = tokens = warmup_tokens = 0
    for iteration in range(60):
        if samples <= warmup:
            expected = 0.1 * samples / warmup
        else:
            warmup_tokens = warmup_tokens or tokens
            path = {"style": style, "init": 0.0, "peak": 0.1, "floor": 0.01, "warmup": 0}
            expected = published_rate(tokens - warmup_tokens, **path, decay=900 - warmup_tokens)
        if samples == warmup:
            warmup_tokens = tokens
        state = TrainState(iteration=iteration, samples=samples, tokens=tokens)
        assert rate(state) == pytest.approx(expected, rel=1e-12)
        samples += 4
        tokens += 4 * plan.curriculum.length_at(iteration + 1)
