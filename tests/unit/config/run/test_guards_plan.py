"""What looks after a run."""

import pytest
from problems import problem
from tiny import tiny_plan

SAVE = ["--save", "s", "--save-interval", "2"]
LOAD = ["--load", "s"]


def test_nothing_is_looked_at_unless_asked_for():
    guards = tiny_plan().guards
    assert not guards.spikes.is_on
    assert guards.replay_step == 0


def test_a_policy_says_what_differs_from_the_usual_one():
    spikes = tiny_plan(*SAVE, "--spike-policy", "window=9,norm=4.5,max=2").guards.spikes
    assert spikes.is_on
    assert (spikes.zscore, spikes.norm, spikes.window) == (6.0, 4.5, 9)
    assert (spikes.rollback, spikes.skip, spikes.after, spikes.most) == (1, 1, 0, 2)
    assert tiny_plan(*SAVE, "--spike-policy", "zscore=0,norm=3").guards.spikes.is_on


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([*SAVE, "--spike-policy", "z=3"], "z=3 has none of the keys zscore, norm, window"),
        ([*SAVE, "--spike-policy", "zscore=x"], "zscore is a number from 0 on"),
        ([*SAVE, "--spike-policy", "zscore=nan"], "zscore is a number from 0 on"),
        ([*SAVE, "--spike-policy", "window=1"], "window is a number from 2 on"),
        ([*SAVE, "--spike-policy", "skip=1.5"], "skip is a count, and 1.5 is not an integer"),
        ([*SAVE, "--spike-policy", ""], "has none of the keys"),
        (["--spike-policy", "zscore=6"], "--spike-policy needs --save"),
        ([*SAVE, "--spike-policy", "zscore=6", "--no-save-optim"], "leave --no-save-optim out"),
        ([*SAVE, "--spike-policy", "zscore=6", "--no-save-rng"], "leave --no-save-rng out"),
        (["--replay-step", "3"], "--replay-step needs --load"),
        ([*LOAD, "--replay-step", "0"], "--replay-step 0 must be at least 1"),
        ([*LOAD, "--replay-step", "3", "--finetune"], "leave --finetune out"),
        ([*LOAD, "--replay-step", "3", "--ckpt-step", "2"], "leave --ckpt-step out"),
        (["--ckpt-step", "2"], "--ckpt-step needs --load"),
        ([*LOAD, "--ckpt-step", "0"], "--ckpt-step 0 must be at least 1"),
        ([*LOAD, "--ckpt-step", "2", "--universal-checkpoint"], "latest_universal names"),
        (["--use-checkpoint-args"], "--use-checkpoint-args needs --load"),
        (
            [*SAVE, *LOAD, "--max-restarts", "2", "--ckpt-step", "2"],
            "--max-restarts resumes from the newest checkpoint",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(flags, message):
    with problem(message):
        tiny_plan(*flags)


@pytest.mark.parametrize("load", ["s/", "./s", "s//", "s"])
def test_a_directory_is_the_same_however_it_is_written(load):
    checkpoint = tiny_plan(*SAVE, "--load", load, "--max-restarts", "1").checkpoint
    assert checkpoint.load == checkpoint.save
    # The first job of a chain has nothing to load yet.
    assert not checkpoint.must_exist
    # Whether it begins or continues is known once the directory has been read.
    assert "--finetune" not in str(tiny_plan(*SAVE, "--load", load, "--finetune").notices)
    assert tiny_plan(*SAVE, "--load", "s2").checkpoint.must_exist
