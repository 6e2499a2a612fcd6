"""Checkpoints of a run that diverges: NaN losses are never saved, and the last good one stays."""

import math

import pytest
from problems import require_problem
from steps import step
from tiny import tiny_config, tiny_plan
from torch import nn

from megatron.checkpointing.manifest import published_tags
from megatron.checkpointing.train_state import TrainState
from megatron.training.checkpoints.save import Checkpoints


class FakeEngine:
    """One weight."""

    def __init__(self):
        self.module = nn.Linear(2, 2)

    def partition_dims(self):
        return {}

    def save(self, directory, tag, client_state, *, optimizer, streams, write):
        write(self.module.state_dict(), directory / tag / "weights.pt")


@pytest.fixture
def start(group, tmp_path):
    """Return a function that starts or continues a run in one directory."""

    def started(*flags, saved=-1, device="cpu"):
        directory = str(tmp_path / "run")
        words = ["--save", directory, "--load", directory, "--save-interval", "1", *flags]
        plan = tiny_plan(*words, device=device)
        return Checkpoints(FakeEngine(), plan, tiny_config(*words), saved=saved)

    return started


def take(checkpoints, losses, first):
    for iteration, loss in enumerate(losses, first):
        checkpoints.after_step(TrainState(iteration=iteration), step(loss))
    checkpoints.finish()


@pytest.mark.parametrize("more", [[], ["--async-save"]], ids=["at once", "in the background"])
@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        (["--keep-last", "1"], {4, 5}),
        (["--keep-last", "2"], {4, 5}),
        (["--keep-every", "3"], {3, 4, 5}),
    ],
)
def test_a_diverged_run_keeps_its_last_good_checkpoint_over_restarts(
    start, tmp_path, flags, more, kept
):
    take(start(*flags, *more), [1.0] * 4, 1)
    # Step 5 is finite, and what it does to the weights is not.
    take(start(*flags, *more, saved=4), [1.0, *[math.nan] * 4], 5)
    for _ in range(3):
        diverged = start(*flags, *more, saved=5)
        take(diverged, [math.nan, math.inf], 6)
        assert "--ckpt-step 4" in diverged.advice()
        assert {int(tag[11:]) for tag in published_tags(tmp_path / "run")} == kept


@pytest.mark.parametrize("more", [[], ["--async-save"]], ids=["at once", "in the background"])
def test_nothing_is_saved_without_a_finite_loss_by_whoever_asks(start, tmp_path, messages, more):
    checkpoints = start(*more)
    take(checkpoints, [1.0, math.nan, math.nan], 1)
    assert not checkpoints.save(TrainState(iteration=3))
    checkpoints.verify()
    assert published_tags(tmp_path / "run") == ["global_step1"]
    assert [line[:29] for line in messages if "not saving" in line] == [
        "not saving at iteration 2: it"
    ]
    # Those that come back are saved as usual.
    take(checkpoints, [1.0], 4)
    assert checkpoints.save(TrainState(iteration=4))
    assert published_tags(tmp_path / "run")[0] == "global_step4"


def test_a_save_that_was_due_follows_the_next_finite_step(group, tmp_path):
    words = ["--save", str(tmp_path), "--save-interval", "4"]
    checkpoints = Checkpoints(FakeEngine(), tiny_plan(*words), tiny_config(*words))
    take(checkpoints, [1.0, 1.0, 1.0, math.nan, math.nan, 1.0, 1.0, 1.0], 1)
    assert published_tags(tmp_path) == ["global_step8", "global_step6"]


def test_a_step_skipped_to_find_a_loss_scale_of_fp16_is_saved(start, tmp_path):
    overflow = step(1.0, math.inf, skipped=True)
    checkpoints = start("--fp16", device="cuda")
    checkpoints.after_step(TrainState(iteration=1), overflow)
    assert published_tags(tmp_path / "run") == ["global_step1"]


def test_the_advice_names_a_checkpoint_that_a_finite_step_has_followed(start):
    checkpoints = start()
    assert checkpoints.advice() == ""
    take(checkpoints, [1.0], 1)
    assert "another --save" in checkpoints.advice()
    take(checkpoints, [1.0, math.nan], 2)
    assert "--ckpt-step 1" in checkpoints.advice()
    checkpoints = start(saved=2)
    take(checkpoints, [math.nan], 3)
    require_problem("no finite step … global_step2", [checkpoints.advice()])
    checkpoints.rewind_to(1)
    take(checkpoints, [1.0, math.nan], 2)
    require_problem("no finite step … global_step2", [checkpoints.advice()])


def test_the_same_command_goes_on_where_the_newest_checkpoint_is_proven(group, tmp_path):
    words = ["--save", str(tmp_path), "--save-interval", "2"]
    checkpoints = Checkpoints(FakeEngine(), tiny_plan(*words), tiny_config(*words))
    take(checkpoints, [1.0, 1.0, 1.0, math.nan], 1)
    require_problem("same command … global_step2", [checkpoints.advice()])
