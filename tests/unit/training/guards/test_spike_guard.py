"""Which step is a spike, and what a run goes back to."""

import json
import math
import random

import numpy as np
import pytest
import torch.distributed as dist
from problems import problem
from steps import step
from tiny import tiny_plan

from megatron.checkpointing.manifest import parse_fields
from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import TrainingError
from megatron.training.guards.loss_spikes import (
    Spike,
    SpikeGuard,
    Watched,
    go_back,
    robust_zscore,
    steps_before,
)
from megatron.training.guards.skip_samples import Skip
from megatron.training.loop.journal import Journal
from megatron.training.telemetry.step_records import StepRecords

SAVE = ["--save", "s", "--save-interval", "2"]


@pytest.fixture(autouse=True)
def _one_rank(group):
    """All ranks agree."""


def policy(text="zscore=5,window=4"):
    return tiny_plan(*SAVE, "--spike-policy", text).guards.spikes


def watch(steps, text="zscore=5,window=4", before=()):
    guard = SpikeGuard(policy(text), before)
    for iteration, result in enumerate(steps, 1):
        guard.after_step(TrainState(iteration=iteration), result)


def test_the_score_is_that_of_numpy_in_64_bits():
    draw = random.Random(0)
    before = [draw.gauss(2, 0.3) for _ in range(51)]
    values = np.array(before, dtype=np.float64)
    deviation = 1.4826 * np.median(np.abs(values - np.median(values)))
    expected = (3.5 - np.median(values)) / deviation
    assert robust_zscore(3.5, before) == pytest.approx(expected, rel=1e-12)
    # An outlier among them hardly moves it; a mean and a deviation would.
    assert robust_zscore(3.5, [*before, 1e6]) == pytest.approx(expected, rel=0.1)


def test_equal_values_do_not_make_every_other_one_a_spike():
    assert robust_zscore(2.0002, [2.0] * 9) == pytest.approx(1)
    assert robust_zscore(0.0, [0.0] * 9) == 0
    assert robust_zscore(2.1, [2.0] * 9) > 100


def test_a_loss_far_above_those_before_is_a_spike_on_its_step():
    calm = [step(2.0), step(2.1), step(1.9), step(2.05)]
    with problem("loss 3 … z-score … 4 steps", Spike) as caught:
        watch([*calm, step(2.1), step(3.0)])
    assert caught.value.iteration == 6


@pytest.mark.parametrize(
    "steps",
    [
        [step(2.0), step(2.1), step(1.9), step(9.0)],  # not enough before it
        [step(2.0), step(2.1), step(1.9), step(2.05), step(0.1)],  # below
        [step(2.0), step(2.1), step(1.9), step(2.05), step(math.nan), step(math.inf)],
        [step(2.0), step(2.1), step(1.9), step(2.05), step(2.0, norm=99.0)],
    ],
)
def test_others_are_none(steps):
    watch(steps)


def test_the_gradient_is_looked_at_when_asked_for():
    calm = [step(2.0, norm) for norm in (1.0, 1.1, 0.9, 1.05, math.inf)]
    with problem("gradient norm 9", Spike):
        watch([*calm, step(2.0, 9.0)], "zscore=0,norm=5,window=4")
    watch([*calm, step(9.0, 1.0), step(2.0, None)], "zscore=0,norm=5,window=4")


def test_steps_before_the_start_are_those_of_the_journal(tmp_path):
    journal = Journal(tmp_path)
    records = StepRecords(journal)
    journal.start(0, {})
    for iteration, loss in enumerate((5.0, 4.0, 3.0, math.nan, 2.0), 1):
        records.after_step(TrainState(iteration=iteration, samples=4 * iteration), step(loss))
    journal.write("rollback", {"iteration": 3, "spike": 5, "passed_over": (5, 5)})
    records.after_step(TrainState(iteration=4, samples=16), step(2.5))
    found = steps_before(tmp_path, policy("window=3"))
    assert found == [Watched(4.0, 1.0), Watched(3.0, 1.0), Watched(2.5, 1.0)]


def test_a_run_that_cannot_go_back_ends(tmp_path):
    save = ["--save", str(tmp_path), "--save-interval", "2", "--spike-policy", "max=1"]
    spike = Spike(7, "loss 9")
    with problem("iteration 7 … loss 9 … --spike-policy … no checkpoint", TrainingError):
        go_back(None, tiny_plan(*save), TrainState(iteration=7), spike, None)
    with problem("iteration 7 … 1 others … --spike-policy", TrainingError):
        go_back(None, tiny_plan(*save), TrainState(iteration=7, spikes=((3, 3),)), spike, None)


def test_ranges_of_spikes_are_passed_over_among_those_of_the_flag(messages):
    class Positions:
        seen = ()

        def seek(self, samples):
            self.seen = (*self.seen, samples)

    stream = Positions()
    skip = Skip([(4, 5)], train_iters=20, batch_size=lambda samples: 2, stream=stream)
    state = TrainState(iteration=1, samples=2, spikes=((6, 7), (2, 3)))
    skip.before_step(state)
    assert (state.iteration, state.samples) == (7, 14)
    assert stream.seen == (6, 10, 14)
    assert [text.split(" due to ")[1] for text in messages] == [
        "--spike-policy flag.",
        "--skip-train-iteration-range flag.",
        "--spike-policy flag.",
    ]


def test_the_state_takes_what_a_manifest_holds():
    state = TrainState()
    saved = json.loads(json.dumps({"iteration": 5, "spikes": ((3, 4),)}))
    state.load(parse_fields(TrainState, saved))
    assert state == TrainState(iteration=5, spikes=((3, 4),))
    assert dist.is_initialized()
