"""The end of a run without numbers."""

import math

import pytest
from problems import problem
from steps import step

from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import TrainingError
from megatron.training.guards.nan_guard import NanGuard

GOOD, NAN, INFINITE = step(1.0, 1.0), step(math.nan, math.inf, skipped=True), step(1.0, math.inf)


def watch(steps, most=3, *, seeks_scale=False):
    guard = NanGuard(most, seeks_scale=seeks_scale)
    for iteration, result in enumerate(steps, 1):
        guard.after_step(TrainState(iteration=iteration, samples=4 * iteration), result)


@pytest.mark.parametrize("bad", [NAN, INFINITE, step(math.inf, 1.0), step(1.0, math.nan)])
def test_some_in_a_row_end_the_run(bad):
    with problem("iteration 4 … samples 12 to 15 … 3 consecutive", TrainingError):
        watch([GOOD, bad, bad, bad])


def test_a_finite_step_begins_the_count_anew(messages):
    watch([NAN, NAN, GOOD, NAN, NAN])
    assert len(messages) == 4
    assert messages[0].endswith("weights are as before; 1 in a row")


def test_overflows_that_seek_a_loss_scale_do_not_count():
    watch([INFINITE] * 9, seeks_scale=True)
    with pytest.raises(TrainingError):
        watch([NAN] * 3, seeks_scale=True)
