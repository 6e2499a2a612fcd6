"""History, summary and terminal view of a run, from a journal that is still being written."""

import json
import os
import socket
from datetime import datetime, timedelta, timezone
from itertools import pairwise

import pytest
from problems import problem

from megatron.common.errors import CheckpointError
from megatron.common.process_identity import pid_namespace, start_of
from megatron.diagnostics.monitor.history import History, JournalReader, checkpoints_in, events_in
from megatron.diagnostics.monitor.summary import sparkline, state_of, summary, view

BEGAN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


def at(seconds):
    return (BEGAN + timedelta(seconds=seconds)).isoformat()


def start(iteration, seconds, attempt=1, **flags):
    set_flags = {f"--{name}": value for name, value in flags.items()}
    known = {"run": "abc", "attempt": attempt, "at": at(seconds)}
    return {"event": "start", "iteration": iteration, **known, "with": {}, "flags": set_flags}


def step(iteration, loss, seconds, skipped=False):
    return {
        "event": "step",
        "iteration": iteration,
        "first_sample": 4 * (iteration - 1),
        "samples": 4 * iteration,
        "tokens": 40 * iteration,
        "seq_length": 10,
        "lm_loss": loss,
        "grad_norm": 2.0,
        "learning_rate": 0.1,
        "skipped": skipped,
        "seconds": 0.5,
        "at": at(seconds),
        "host": "node1",
    }


def write(folder, *records):
    with (folder / "journal.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def history_of(folder):
    history = History()
    history.add(JournalReader(folder).new_records())
    return history


def test_repeated_steps_are_contained_once(tmp_path):
    write(tmp_path, start(0, 0), *(step(i, 10.0 - i, i) for i in range(1, 6)))
    write(tmp_path, {"event": "train", "iteration": 5, "train_iters": 8, "eta_s": 9.0})
    write(tmp_path, start(3, 10, attempt=2, lr=0.5), step(4, 1.0, 11), step(5, None, 12))
    history = history_of(tmp_path)
    assert [*history.steps.iterations] == [1, 2, 3, 4, 5]
    assert [*history.steps.curves["loss"]][:4] == [9.0, 8.0, 7.0, 1.0]
    assert history.steps.curves["tokens_per_second"][0] == 4 * 10 / 0.5
    assert history.intervals == []  # iteration 5 of the first attempt was rolled back
    assert (history.run, history.attempt, history.iteration) == ("abc", 2, 5)
    kinds = [(event.kind, event.iteration) for event in history.events]
    assert kinds == [("start", 0), ("start", 3), ("step", 5)]
    assert "--lr 0.5" in history.events[1].text


def test_half_a_line_is_read_later_and_a_damaged_one_never(tmp_path):
    lines = [json.dumps(r) for r in (start(0, 0), step(1, 3.0, 1), step(2, 2.0, 2))]
    journal = "\n".join(
        [*lines[:2], '{"event": "st', "[1]", '{"event": 3, "iteration": 1}', lines[2]]
    )
    journal += "\n"
    reader, history, written = JournalReader(tmp_path), History(), 0
    with (tmp_path / "journal.jsonl").open("w") as file:
        # Cut everywhere: the same records come, each once.
        for begin, end in pairwise([*range(0, len(journal), 7), len(journal)]):
            file.write(journal[begin:end])
            file.flush()
            written = end
            history.add(reader.new_records())
    assert written == len(journal)
    assert [*history.steps.curves["loss"]] == [3.0, 2.0]
    assert history.events == history_of(tmp_path).events


def test_consecutive_skipped_steps_are_one_event(tmp_path):
    write(tmp_path, start(0, 0), *(step(i, 9.0, i, skipped=i in (1, 2, 3, 5)) for i in range(1, 7)))
    texts = [event.text.partition(":")[0] for event in history_of(tmp_path).events[1:]]
    assert texts == ["iteration 1 to 3", "iteration 5"]


def failure(folder, name, seconds, message):
    record = {"kind": "error", "rank": 3, "host": "node2", "stage": "a step", "iteration": 2}
    record |= {"time": at(seconds), "message": message, "traceback": ""}
    (folder / name).write_text(json.dumps(record))


def test_failures_stand_between_the_starts(tmp_path):
    write(tmp_path, start(0, 0), step(1, 3.0, 1), start(1, 60, attempt=2), step(2, 2.0, 61))
    failure(tmp_path, "failure-1.json", 30, "first")
    (tmp_path / "failure-2.json").write_text("{")
    history = history_of(tmp_path)
    kinds = [event.kind for event in events_in(history, tmp_path)]
    assert kinds == ["start", "failure", "start"]
    now = BEGAN + timedelta(seconds=63)
    assert state_of(history, tmp_path, now) == ("running: the last record is 0:00:02 old", False)
    later = now + timedelta(hours=1)
    assert state_of(history, tmp_path, later)[0].startswith("silent for 1:00:02")
    failure(tmp_path, "failure.json", 70, "second")
    state, is_bad = state_of(history, tmp_path, now)
    assert state.endswith("error (rank 3 on node2, a step): second") and is_bad
    write(tmp_path, {"event": "end", "iteration": 2, "reason": "done", "exit_code": 0})
    assert state_of(history_of(tmp_path), tmp_path, now) == ("ended: done", False)


def test_a_killed_process_of_this_host_is_detected_at_once(tmp_path):
    write(tmp_path, start(0, 0), step(1, 3.0, 1))
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": "then"}
    owner |= {"started": start_of(os.getpid()), "numbers": pid_namespace()}

    def state(**changes):
        (tmp_path / "lock.json").write_text(json.dumps(owner | changes))
        return state_of(history_of(tmp_path), tmp_path, BEGAN + timedelta(seconds=2))

    assert state()[0].startswith("running")
    assert state(started="1", numbers="another host")[0].startswith("running")
    text, is_bad = state(started="1")
    assert (
        text.startswith(f"killed: process {os.getpid()} on {owner['host']}, since then") and is_bad
    )
    assert "docs/stopping.md" in view(history_of(tmp_path), tmp_path, BEGAN, width=None)


def test_an_earlier_failure_is_not_the_state_of_a_run(tmp_path):
    failure(tmp_path, "failure-1.json", 70, "first")
    state, is_bad = state_of(History(), tmp_path, BEGAN)
    assert "failed" not in state and not is_bad


def test_numbers_are_those_of_the_journal(tmp_path):
    first, second = (
        step(i, 3.0, i) | {"seconds": seconds} for i, seconds in ((1, 0.25), (2, 0.75))
    )
    write(tmp_path, start(0, 0), first, second)
    record = {"iteration": 2, "train_iters": 8, "eta_s": 90.0, "tflops": 1.5, "mfu": 0.25}
    write(
        tmp_path, {"event": "train", **record, "resident_gib": 1.25, "energy_kwh": 0.5, "co2_kg": 1}
    )
    write(tmp_path, {"event": "evaluation", "set": "va|id", "iteration": 2, "lm_loss": None})
    write(tmp_path, {"event": "ranks", "iteration": 2, "slowest": 7, "host": "n", "slowness": 1.5})
    for iteration in (1, 2):
        (tmp_path / f"global_step{iteration}").mkdir()
    (tmp_path / "global_step1" / "manifest.json").write_text("{}")
    now = datetime.now(timezone.utc)
    lines = dict(summary(history_of(tmp_path), tmp_path, now))
    assert lines["iteration"] == "2 of 8 (25.0%)"
    assert lines["consumed"] == "8 samples, 80 tokens"
    assert lines["remaining"] == "0:01:30, as of iteration 2"
    assert lines["speed"] == "500.0 ms a step, 80 tokens/s"
    assert lines["use"] == "1.5 TFLOPs a process, MFU 25.0%"
    assert lines["memory (GiB)"] == "resident 1.25"
    assert lines["energy"] == "0.5 kWh, 1 kg of CO2"
    assert lines["va|id set"].startswith("loss NaN, perplexity NaN, at iteration 2")
    assert lines["slowest"] == "rank 7 on n: 1.5 times the median"
    assert lines["checkpoint"].startswith("iteration 1, 1 back, 0:00:0")
    assert [c.iteration for c in checkpoints_in(tmp_path)] == [1]


def test_the_view_fits_its_width_and_has_no_control_characters(tmp_path):
    write(tmp_path, start(0, 0), step(1, 3.0, 1))
    failure(tmp_path, "failure.json", 30, "\x1b[2J\nno\x07" + "Z" * 500)
    text = view(history_of(tmp_path), tmp_path, BEGAN, width=70)
    assert all(len(line) <= 70 for line in text.splitlines())
    assert not {c for c in text if not c.isprintable()} - {"\n"}
    # Wrapped, not cut: no letter is missing; in a pipe a line is one.
    assert text.count("Z") == 2 * 500
    assert f"[2J no {500 * 'Z'}\n" in view(history_of(tmp_path), tmp_path, BEGAN, width=None)


@pytest.mark.parametrize(
    ("values", "width", "bars"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([1.0, 3.0, 5.0, 7.0], 2, "▁█"),
        ([1.0, float("nan"), 2.0], 3, "▁x█"),
        ([5.0, 5.0], 9, "▁▁"),
        ([float("nan")], 9, "x"),
        ([], 9, ""),
    ],
)
def test_bars_are_means_between_the_lowest_and_the_highest(values, width, bars):
    assert sparkline(values, width) == bars


def test_a_directory_without_a_journal_is_an_error(tmp_path):
    with problem(f"{tmp_path}/none … --save", CheckpointError):
        history_of(tmp_path / "none")
