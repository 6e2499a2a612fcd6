"""--finetune and --reset-progress with --load and --save on one directory: a first start, then resumes."""

import os

import pytest
from problems import problem
from tiny import tiny_config, tiny_plan

from megatron.checkpointing.manifest import published_tags
from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import WrongCheckpointError
from megatron.training.checkpoints.checkpoint_choice import choose_checkpoint
from megatron.training.checkpoints.resume import resume
from megatron.training.checkpoints.save_directory import require_own
from megatron.training.checkpoints.start_in_place import with_start_in_place


@pytest.fixture
def start(job):
    """Start the job with flags; return its state, whose checkpoints can be saved by `job.save`."""

    def start(*flags):
        words = [*job.flags, *flags]
        plan = with_start_in_place(tiny_plan(*words), tiny_config(*words))
        require_own(plan)
        state = TrainState()
        if chosen := choose_checkpoint(plan):
            resume(job.engine, plan, state, chosen)
        return state

    return start


def test_each_start_reports_what_it_does(job, start, caplog):
    caplog.set_level("INFO")

    def reports(flag):
        caplog.clear()
        start(flag)
        return caplog.text

    job.save(5)
    assert "are in " in (first := reports("--finetune"))
    assert "starts from" in first
    again = reports("--finetune")
    assert f"starts from {job.directory / 'initial'}" in again
    job.save(10)
    later = reports("--reset-progress")
    assert "--reset-progress is ignored" in later
    assert "starts from" not in later


def test_the_first_start_moves_the_checkpoints_and_the_next_continues(job, start):
    for iteration in (5, 10):
        job.save(iteration)
    (job.directory / "notes.txt").write_text("of the user")
    assert start("--finetune") == TrainState()
    initial = job.directory / "initial"
    assert job.engine.loaded == [(initial, "global_step10")]
    assert job.engine.parts == {"optimizer": False, "streams": False}
    assert published_tags(initial) == ["global_step10", "global_step5"]
    assert (initial / "latest").read_text() == "global_step10"
    assert published_tags(job.directory) == []
    assert (job.directory / "notes.txt").exists()
    # Killed before it saved anything: once more from the same weights.
    assert start("--finetune") == TrainState()
    job.save(5)
    assert start("--finetune") == TrainState(iteration=5, samples=10)
    assert job.engine.loaded[-1] == (job.directory, "global_step5")
    assert job.engine.parts == {"optimizer": True, "streams": True}
    assert start() == TrainState(iteration=5, samples=10)


def test_the_start_may_take_an_older_checkpoint(job, start):
    for iteration in (5, 10):
        job.save(iteration)
    assert start("--reset-progress", "--ckpt-step", "5") == TrainState()
    assert job.engine.loaded == [(job.directory / "initial", "global_step5")]
    assert job.engine.parts == {"optimizer": True, "streams": True}
    job.save(15)
    assert start("--reset-progress", "--ckpt-step", "5") == TrainState(iteration=15, samples=30)


def test_a_start_that_was_killed_while_it_moved_checkpoints_goes_on(job, start):
    for iteration in (5, 10):
        job.save(iteration)
    (job.directory / "staging-initial").mkdir()
    moved = job.directory / "staging-initial" / "global_step10"
    os.rename(job.directory / "global_step10", moved)
    assert start("--finetune") == TrainState()
    assert job.engine.loaded == [(job.directory / "initial", "global_step10")]


def test_nothing_starts_from_random_weights(job, start):
    job.directory.mkdir()
    with problem("--load … /runs … no checkpoint to start from", WrongCheckpointError):
        start("--finetune")
    assert os.listdir(job.directory) == []
    job.save(5)
    start("--finetune")
    with problem("/initial … --finetune … --reset-progress", WrongCheckpointError):
        start()


def test_evaluation_moves_nothing(job, start):
    job.save(5)
    assert start("--finetune", "--eval-only") == TrainState()
    assert published_tags(job.directory) == ["global_step5"]
