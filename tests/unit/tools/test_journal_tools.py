"""The tools that read a run's journal: why_step and tb/rebuild."""

import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import tiny_config, tiny_plan

from megatron.checkpoint.manifest import Manifest, write_manifest
from megatron.training.journal import Journal
from megatron.training.loop import StepResult
from megatron.training.state import TrainState
from megatron.training.step_records import StepRecords
from megatron.training.tensorboard import TensorBoard
from megatron.training.writers import build_writer

TOOLS = Path(__file__).parents[3] / "tools"
LOSSES = [3.0, 2.5, math.nan, 2.0]


def taken(loss):
    return StepResult(
        loss=loss,
        lr=0.1,
        batch_size=2,
        seq_length=6,
        seconds=0.5,
        grad_norm=2.0 * loss if math.isfinite(loss) else math.inf,
        loss_scale=1.0,
        skipped=not math.isfinite(loss),
    )


@pytest.fixture
def run(tmp_path):
    """A directory with the journal of a run that went on from step 1, and its checkpoint."""
    flags = ("--save", str(tmp_path), "--save-interval", "1")
    flags = (*flags, "--tensorboard-dir", str(tmp_path / "live"))
    plan, config = tiny_plan(*flags), tiny_config(*flags)
    live = TensorBoard(build_writer(plan.logging), plan, asdict(config), TrainState())
    for start, losses in ((0, [LOSSES[0], 9.0, 9.0]), (1, LOSSES[1:])):
        journal = Journal(tmp_path)
        journal.start(start, {})
        for iteration, loss in enumerate(losses, start + 1):
            state = TrainState(iteration=iteration, samples=2 * iteration, tokens=12 * iteration)
            StepRecords(journal).after_step(state, taken(loss))
            if loss != 9.0:
                live.after_step(state, taken(loss))
    journal.write("evaluation", {"set": "valid", "iteration": 4, "lm_loss": 2.0, "ppl": 7.4})
    live.after_evaluation("valid", 2.0, 7.4, state)
    live.close()
    folder = tmp_path / "global_step4"
    folder.mkdir()
    manifest = {"versions": {}, "partition_dims": {}, "files": ()}
    write_manifest(folder, Manifest(state={}, plan=asdict(plan), config=asdict(config), **manifest))
    return tmp_path


def curves(folder):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(e.step, repr(e.value)) for e in events.Scalars(tag)] for tag in tags}


def tool(name, *words):
    return subprocess.run(
        [sys.executable, str(TOOLS / name), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_rebuilt_curves_are_those_that_were_written_live(run):
    done = tool("tb/rebuild.py", "--load", run, "--tensorboard-dir", run / "anew")
    assert done.returncode == 0, done.stderr
    told = curves(run / "anew")
    assert told == curves(run / "live")
    assert [step for step, _ in told["lm-loss-training/lm loss"]] == [1, 2, 3, 4]
    again = tool("tb/rebuild.py", "--load", run, "--tensorboard-dir", run / "anew")
    assert again.returncode == 2
    assert "holds event files" in again.stderr


def test_a_step_that_the_journal_does_not_tell_of(run):
    done = tool("why_step.py", 5, "--load", run)
    assert done.returncode == 2
    assert f"step 5: the journal in --load {run} does not tell of it" in done.stderr


def test_every_attempt_at_a_step_is_told(run):
    lines = tool("why_step.py", 3, "--load", run).stdout.splitlines()
    assert [line.split(", on")[0].split(", ")[-1] for line in lines[:4:2]] == [
        "attempt 1",
        "attempt 2",
    ]
    assert "lm_loss 9.0" in lines[1]
    assert "lm_loss no number | grad_norm no number" in lines[3]
    assert "median lm_loss of the 3 steps around it: 2.5" in lines[4]
