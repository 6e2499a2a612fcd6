"""A run with most of its switches on: what it leaves, how it goes on, and how it is stopped."""

import csv
import json
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jobs import REPOSITORY, Corpus, Finished, journal, start_ranks
from jobs import start as start_command

RUN = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--split", "80,10,10"),
    *("--micro-batch-size", "1", "--global-batch-size", "4", "--lr", "3e-3"),
    *("--log-interval", "1", "--eval-interval", "0", "--eval-iters", "1"),
    *("--pipeline-model-parallel-size", "2", "--deterministic-mode"),
]
CURRICULUM = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 8,
    "max_difficulty": 32,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 8, "difficulty_step": 8},
}
LENGTHS = {1: 8, 2: 8, 3: 16, 7: 24, 8: 32, 9: 32}
"""Tokens per sample of the iterations that are not skipped."""


@pytest.fixture(scope="module")
def flags(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags of all runs of this file."""
    config = tmp_path_factory.mktemp("json") / "ds.json"
    config.write_text(json.dumps({"curriculum_learning": CURRICULUM}))
    return [
        *RUN,
        *corpus.flags,
        *("--deepspeed_config", str(config), "--save-interval", "3", "--train-iters", "9"),
        *("--skip-train-iteration-range", "4-5", "5-6", "--log-params-norm"),
        *("--log-num-zeros-in-grad", "--timing-log-level", "2"),
    ]


@pytest.fixture(scope="module")
def whole(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """A run to its end, and the directory of all that it wrote."""
    folder = tmp_path_factory.mktemp("whole")
    output = [
        *("--tensorboard-dir", str(folder / "events"), "--log-timers-to-tensorboard"),
        *("--codecarbon-dir", str(folder / "energy"), "--log-path", str(folder / "flags")),
        *("--profile", "--profile-step-start", "2", "--profile-step-end", "4"),
        *("--profile-dir", str(folder / "traces"), "--profile-ranks", "0", "1"),
        *("--device-peak-tflops", "2"),
    ]
    return folder, start_ranks(2, *flags, *output, "--save", str(folder / "save")).succeeded()


def test_the_log_and_the_journal_tell_what_was_measured(whole: tuple[Path, Finished]) -> None:
    folder, job = whole
    lines = job.outputs[0].splitlines()
    assert "Skipped iterations 4 to 6 due to --skip-train-iteration-range flag." in lines
    records = journal(folder / "save", "train")
    assert {r["iteration"]: r["curriculum_seqlen"] for r in records} == LENGTHS
    assert [r["consumed_samples"] for r in records] == [4 * i for i in LENGTHS]
    tokens = [r["consumed_tokens"] for r in records]
    assert [b - a for a, b in zip([0, *tokens], tokens, strict=False)] == [
        4 * length for length in LENGTHS.values()
    ]
    # The rows of the table of positions that no sample of 8 tokens reaches: 24 of 32 features.
    assert 24 * 32 <= records[0]["num_zeros"] < 24 * 32 + 100
    assert records[-1]["num_zeros"] < 100
    assert all(10 < r["params_norm"] < 20 for r in records)
    timed = next(line for line in lines if line.startswith("time (ms)"))
    assert "| forward-compute: " in timed
    assert "| backward-embedding-all-reduce: " in timed
    assert "| energy (kWh): " in next(line for line in lines if line.startswith(" iteration"))


def test_memory_and_devices_are_told_too(whole: tuple[Path, Finished]) -> None:
    folder, job = whole
    for record in journal(folder / "save", "train"):
        assert record["mfu"] == record["hfu"] == pytest.approx(record["tflops"] / 2)
        assert 0.1 < record["resident_gib"] < 10 and record["host_available_gib"] > 0
    (end,) = journal(folder / "save", "end")
    assert (end["iteration"], end["exit_code"]) == (9, 0)
    (start,) = journal(folder / "save", "start")
    assert start["flags"]["--pipeline-model-parallel-size"] == 2
    assert "energy of this start: 0.0" in job.outputs[0]

    tool = [sys.executable, str(REPOSITORY / "tools" / "watch.py"), str(folder / "save")]
    shown = start_command(*tool, "--once").succeeded().outputs[0]
    assert f"ended: {end['reason']}" in shown
    assert "iteration      9 of 9 (100.0%)" in shown
    page = folder / "page.html"
    start_command(*tool, "--html", str(page)).succeeded()
    text = page.read_text()
    assert text.count('<svg class="chart"') == 10 and "&quot;tensor&quot;: 1" in text


def test_every_asked_for_file_is_there(whole: tuple[Path, Finished]) -> None:
    folder, _ = whole
    with (folder / "energy" / "emissions-000.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [int(row["iteration"]) for row in rows] == [*LENGTHS, 9]
    assert float(rows[-1]["total_energy_kwh"]) > 0
    assert sorted(file.name for file in (folder / "traces").iterdir()) == [
        "trace_rank0_iterations2-3.json",
        "trace_rank1_iterations2-3.json",
    ]
    (dump,) = (folder / "flags").iterdir()
    assert "  train_iters ..................................... 9" in dump.read_text()
    (events,) = (folder / "events").iterdir()
    content = events.read_bytes()
    for tag in (
        "params-norm/params-norm vs tokens",
        "num-zeros/num-zeros vs samples",
        "curriculum_seqlen",
        "time/forward-compute-time",
    ):
        assert tag.encode() in content, tag


def test_a_run_resumed_before_a_skipped_range_equals_the_uninterrupted_one(
    whole: tuple[Path, Finished], flags: list[str], tmp_path: Path
) -> None:
    folder, _ = whole
    shutil.copytree(folder / "save" / "global_step3", tmp_path / "global_step3")
    start_ranks(2, *flags, "--save", str(tmp_path), "--load", str(tmp_path)).succeeded()
    output = ("iteration", "lm_loss", "grad_norm", "params_norm", "num_zeros", "consumed_tokens")
    expected, found = (
        [[record[name] for name in output] for record in journal(save, "train")]
        for save in (folder / "save", tmp_path)
    )
    assert found == expected[3:]


def test_weights_alone_are_enough_to_evaluate_and_to_finetune(
    whole: tuple[Path, Finished], flags: list[str], tmp_path: Path
) -> None:
    folder, job = whole
    load = ["--load", str(folder / "save")]
    save = tmp_path / "save"
    again = [*flags, *load, "--save", str(save)]
    evaluated = start_ranks(2, *again, "--inference", "--eval-only", "True").succeeded()
    last = [line for line in job.outputs[0].splitlines() if "loss value" in line][-1]
    assert last in evaluated.outputs[0]
    assert last.startswith("test loss")
    assert not [*save.glob("global_step*")]

    tuned = start_ranks(2, *again, "--finetune", "--exit-interval", "1").succeeded()
    assert " iteration        1/       9 | consumed samples:            4 |" in tuned.outputs[0]


def test_a_file_stops_the_run_after_its_step_and_the_next_start(
    flags: list[str], tmp_path: Path
) -> None:
    save, switch = tmp_path / "save", tmp_path / "stop"
    endless = [*flags, "--save", str(save), "--load", str(save), "--train-iters", "100000"]
    stoppable = [*endless, "--kill-switch-path", str(switch), "--exit-duration-in-mins", "5"]
    with ThreadPoolExecutor() as threads:
        running = threads.submit(start_ranks, 2, *stoppable)
        while not running.done() and not (save / "global_step9").exists():
            time.sleep(0.1)
        switch.touch()
        stopped = running.result().succeeded()
    last = journal(save, "train")[-1]["iteration"]
    assert f"Detected kill switch at {switch}. Exiting" in stopped.outputs[0]
    assert (save / f"global_step{last}" / "manifest.json").exists()

    refused = start_ranks(2, *stoppable).succeeded()
    assert f"Detected kill switch at {switch}. Exiting" in refused.outputs[0]
    assert journal(save, "train")[-1]["iteration"] == last
