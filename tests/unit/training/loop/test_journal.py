"""The run's record."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from problems import problem, require_problem
from tiny import tiny_config

from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import CheckpointError
from megatron.diagnostics.monitor.history import JournalReader
from megatron.training.loop.journal import Journal, every_attempt, now, read_journal
from megatron.training.loop.loop import StepResult
from megatron.training.process.flags_file import given_flags
from megatron.training.telemetry.step_records import StepRecords, read_step


def test_what_was_done_again_is_told_once(tmp_path):
    journal = Journal(tmp_path)
    journal.write("start", {"iteration": 0})
    for iteration in (1, 2, 3):
        journal.write("train", {"iteration": iteration, "lm_loss": 1.0})
    journal.write("start", {"iteration": 2})
    journal.write("train", {"iteration": 3, "lm_loss": 2.0})
    messages = [r for r in read_journal(tmp_path) if r["event"] == "train"]
    assert [(r["iteration"], r["lm_loss"]) for r in messages] == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_a_directory_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with problem("--save … file/run: Not a directory", CheckpointError):
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
    output = given_flags(config)
    assert {
        "--num-layers": 2,
        "--seed": 77,
        "--swiglu": True,
        "--lr": 0.1,
    }.items() <= output.items()
    assert "--clip-grad" not in output  # 1.0 is the default
    Journal(tmp_path).start(0, {"python": "3"}, output)
    (record,) = read_journal(tmp_path)
    assert (record["flags"], record["with"]) == (json.loads(json.dumps(output)), {"python": "3"})
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
    messages = read_step(second)
    assert (messages.state, messages.step) == (
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
    with problem("/dev/full: No space left", CheckpointError):
        journal.write("step", {"iteration": 1})


def test_a_directory_without_a_run_is_told(tmp_path):
    with problem("journal.jsonl: No such file … no run", CheckpointError):
        every_attempt(tmp_path, 1)


STEP = {
    **{"event": "step", "run": "a1", "attempt": 1, "iteration": 1, "first_sample": 0, "samples": 4},
    **{"tokens": 32, "seq_length": 8, "lm_loss": 1.0, "learning_rate": 0.1, "loss_scale": 1.0},
    **{"skipped": False, "seconds": 0.5, "at": "2025-01-02T03:04:05+00:00", "host": "n"},
}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("5", "no record of a run"),
        ("null", "no record of a run"),
        ('{"evemt": "start", "iteration": 1}', "a record without event"),
        ('{"event": "start", "iterathon": 1}', "a record without iteration"),
        ('{"event": "start", "iteration": "1"}', "a record whose iteration is '1'"),
        ('{"event": "start", "iteration": -1}', "a record whose iteration is '-1'"),
        ('{"event": "start", "iteration": 1, "flags": 3}', "a record whose flags is '3'"),
        ('{"event": ["start"], "iteration": 1}', "a record whose event is"),
        (json.dumps(STEP | {"samples": 2**70}), "a record whose samples is '11805"),
        (json.dumps(STEP | {"lm_loss": "1"}), "a record whose lm_loss is '1'"),
        ("[" * 100_000, ""),
        ('{"event": "start", "iteration": ' + "9" * 5000 + "}", ""),
        ('{"event": "step", "iter', ""),
        ("\x00\x00\x00\x00", ""),
    ],
)
def test_a_wrong_line_is_skipped_by_every_reader_with_one_warning(
    tmp_path, messages, line, problem
):
    journal = Journal(tmp_path)
    journal.start(0, {})
    journal.write("step", {name: STEP[name] for name in STEP if name != "event"})
    with (tmp_path / "journal.jsonl").open("a") as stream:
        stream.write(f"{line}\n{line}\n")
    again = Journal(tmp_path)
    assert (again.run, again.attempt) == (journal.run, 1)
    again.start(1, {})
    expected = [1] if problem else []
    assert [
        messages.count(text) for text in messages if "line 3: " in text and problem in text
    ] == expected
    messages.clear()
    seen = [
        [*read_journal(tmp_path)],
        [*JournalReader(tmp_path).new_records()],
        [*every_attempt(tmp_path, 1)],
    ]
    assert [[record["event"] for record in records] for records in seen[:2]] == [
        ["start", "step", "start"]
    ] * 2
    assert [read_step(record).step.loss for record in seen[2]] == [1.0]
    assert len(messages) == 3 * len(expected)


def test_a_step_that_lacks_something_is_for_watchers_alone(tmp_path, messages):
    (tmp_path / "journal.jsonl").write_text(json.dumps(STEP).replace("lm_loss", "lm_lors") + "\n")
    assert [*read_journal(tmp_path)] == []
    require_problem("line 1 … 'step' … lm_loss", messages[:1])
    assert len([*JournalReader(tmp_path).new_records()]) == 1


def test_a_journal_that_is_a_fifo_is_told_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "journal.jsonl")
    with problem("--save … not a regular file … journal.jsonl", CheckpointError):
        Journal(tmp_path)
    with problem("journal.jsonl … not a regular file", CheckpointError):
        every_attempt(tmp_path, 1)


def test_a_loss_of_several_terms_is_read_with_its_total(tmp_path):
    journal = Journal(tmp_path)
    terms = {"lm loss": 2.0, "sop loss": 0.5}
    result = replace(taken(2.5), measures=terms)
    StepRecords(journal).after_step(TrainState(iteration=1, samples=4), result)
    (record,) = read_journal(tmp_path)
    assert (record["lm_loss"], record["sop_loss"], record["loss"]) == (2.0, 0.5, 2.5)
    again = read_step(record).step
    assert (again.loss, again.measures) == (2.5, terms)
