"""The run's record."""

import json
from pathlib import Path

import pytest
from tiny import tiny_config

from megatron.errors import CheckpointError
from megatron.training.flags_file import flags_said
from megatron.training.journal import Journal, every_attempt, now, read_journal
from megatron.training.loop import StepResult
from megatron.training.state import TrainState
from megatron.training.step_records import StepRecords, read_step


def test_what_was_done_again_is_told_once(tmp_path):
    journal = Journal(tmp_path)
    journal.write("start", {"iteration": 0})
    for iteration in (1, 2, 3):
        journal.write("train", {"iteration": iteration, "lm_loss": 1.0})
    journal.write("start", {"iteration": 2})
    journal.write("train", {"iteration": 3, "lm_loss": 2.0})
    told = [r for r in read_journal(tmp_path) if r["event"] == "train"]
    assert [(r["iteration"], r["lm_loss"]) for r in told] == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_a_directory_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="--save .*file/run: "):
        Journal(tmp_path / "file" / "run")


def taken(loss):
    return StepResult(
        loss=loss,
        lr=0.1,
        batch_size=4,
        seq_length=8,
        seconds=0.5,
        grad_norm=2.0,
        loss_scale=1.0,
        skipped=False,
    )


def test_a_start_tells_what_was_asked_for(tmp_path):
    config = tiny_config("--seed", "77", "--swiglu", "--clip-grad", "1.0")
    said = flags_said(config)
    assert {"--num-layers": 2, "--seed": 77, "--swiglu": True, "--lr": 0.1}.items() <= said.items()
    assert "--clip-grad" not in said  # 1.0 is the default
    Journal(tmp_path).start(0, {"python": "3"}, said)
    (record,) = read_journal(tmp_path)
    assert (record["flags"], record["with"]) == (json.loads(json.dumps(said)), {"python": "3"})
    assert record["at"] <= now()


def test_each_step_is_known_by_run_attempt_and_iteration(tmp_path):
    for started_from, loss in ((0, 1.0), (1, 2.0)):
        journal = Journal(tmp_path)
        journal.start(started_from, {})
        for iteration in range(started_from + 1, 4):
            state = TrainState(iteration=iteration, samples=4 * iteration, tokens=32 * iteration)
            StepRecords(journal).after_step(state, taken(loss))
    first, second = every_attempt(tmp_path, 3)
    assert first["run"] == second["run"]
    assert (first["attempt"], first["lm_loss"]) == (1, 1.0)
    assert (second["attempt"], second["lm_loss"]) == (2, 2.0)
    assert (second["first_sample"], second["samples"]) == (8, 12)
    assert second["host"] and second["at"]
    told = read_step(second)
    assert (told.state, told.step) == (
        TrainState(iteration=3, samples=12, tokens=96),
        taken(2.0),
    )
    standing = [r["attempt"] for r in read_journal(tmp_path) if r["event"] == "step"]
    assert standing == [1, 2, 2]


def test_half_a_line_of_a_killed_run_is_left_out(tmp_path):
    Journal(tmp_path).start(0, {"torch": "1"})
    with (tmp_path / "journal.jsonl").open("a") as stream:
        stream.write('{"event": "step", "iter')
    Journal(tmp_path).start(2, {})
    assert [record["attempt"] for record in read_journal(tmp_path)] == [1, 2]


def test_a_disk_that_takes_no_record_is_told(tmp_path):
    journal = Journal(tmp_path)
    journal.file = Path("/dev/full")
    with pytest.raises(CheckpointError, match="/dev/full: No space left on device"):
        journal.write("step", {"iteration": 1})


def test_a_directory_without_a_run_is_told(tmp_path):
    with pytest.raises(CheckpointError, match="no run has saved there"):
        every_attempt(tmp_path, 1)
