"""The tools that read a run's journal: why_step and tb/rebuild."""

import json
import math
import string
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from problems import require_problem
from scripts import run_script
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import tiny_config, tiny_plan

from megatron.checkpointing.manifest import Manifest, write_manifest
from megatron.checkpointing.train_state import TrainState
from megatron.data.datasets.datasets import build_datasets
from megatron.data.token_files.indexed_dataset import IndexedDatasetWriter
from megatron.training.loop.journal import Journal
from megatron.training.loop.loop import StepResult
from megatron.training.process.flags_file import given_flags
from megatron.training.telemetry.step_records import StepRecords
from megatron.training.telemetry.tensorboard import TensorBoard
from megatron.training.telemetry.writers import build_writer

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
    live = TensorBoard(build_writer(plan.logging, {}), plan, asdict(config), TrainState())
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
    write_manifest(
        folder, Manifest(state=TrainState(), plan=plan.to_dict(), config=asdict(config), **manifest)
    )
    return tmp_path


def curves(folder):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(e.step, repr(e.value)) for e in events.Scalars(tag)] for tag in tags}


def tool(name, *words):
    return run_script(f"tools/{name}", *words)


def test_rebuilt_curves_are_those_that_were_written_live(run):
    done = tool("tb/rebuild.py", "--load", run, "--tensorboard-dir", run / "anew")
    assert done.returncode == 0, done.stderr
    rebuilt = curves(run / "anew")
    assert rebuilt == curves(run / "live")
    assert [step for step, _ in rebuilt["lm-loss-training/lm loss"]] == [1, 2, 3, 4]
    again = tool("tb/rebuild.py", "--load", run, "--tensorboard-dir", run / "anew")
    assert again.returncode == 2
    assert "holds event files" in again.stderr


@pytest.mark.parametrize("name", ["watch.py", "checkpoint/inspect.py"])
def test_a_folder_that_is_not_there_is_a_mistake_of_the_command(name, tmp_path):
    done = tool(name, tmp_path / "none")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {tmp_path / 'none'}: ")


@pytest.mark.parametrize("flag", ["-h", "--help", "--help-all"])
def test_every_flag_of_help_prints_it(flag):
    done = tool("why_step.py", flag)
    assert done.returncode == 0
    assert "tools/why_step.py STEP --load DIR" in done.stdout


def test_a_step_without_a_record_is_an_error(run):
    done = tool("why_step.py", 5, "--load", run)
    assert done.returncode == 2
    require_problem(f"step 5: … --load {run} … no record", [done.stderr])


def test_every_attempt_at_a_step_is_printed(run):
    lines = tool("why_step.py", 3, "--load", run).stdout.splitlines()
    assert [line.split(", on")[0].split(", ")[-1] for line in lines[:4:2]] == [
        "attempt 1",
        "attempt 2",
    ]
    assert "lm_loss 9.0" in lines[1]
    assert "lm_loss NaN | grad_norm NaN" in lines[3]
    assert "median lm_loss of the 3 steps around it: 2.5" in lines[4]


def test_each_attempt_has_the_samples_of_its_own_flags(tmp_path):
    letters = {letter: i for i, letter in enumerate([*string.ascii_letters, "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(letters))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with IndexedDatasetWriter(tmp_path / "corpus", "u2") as writer:
        for i in range(52):
            writer.append(np.full(6, i))
    data = ("--data-path", str(tmp_path / "corpus"), "--split", "1,0,0", "--seed", "5")
    data += ("--vocab-file", str(tmp_path / "vocab.json"))
    data += ("--merge-file", str(tmp_path / "merges.txt"))
    # An epoch has 51 samples, of two a step: the second attempt reads one, the others two.
    lengths, samples = ("50", "20", "50"), []
    for length in lengths:
        flags = (*data, "--train-iters", length)
        config, plan = (made(*flags, without=("--data-path",)) for made in (tiny_config, tiny_plan))
        journal = Journal(tmp_path)
        journal.start(6, {"devices": "1 x CPU"}, given_flags(config))
        state = TrainState(iteration=7, samples=14, tokens=84)
        StepRecords(journal).after_step(state, taken(2.0))
        read = build_datasets(plan.data, seq_length=6, seed=5).train
        samples.append([[piece.document for piece in read.origin(i).pieces] for i in (12, 13)])
    assert samples[0] == samples[2] != samples[1]

    done = tool("why_step.py", 7, "--load", tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    heads = [i for i, line in enumerate(lines) if line.startswith("samples of attempt ")]
    assert [lines[i] for i in heads] == ["samples of attempt 1 and 3:", "samples of attempt 2:"]
    for head, documents in zip(heads, samples, strict=False):
        for line, there in zip(lines[head + 1 : head + 5 : 2], documents, strict=True):
            pieces = line.partition(" documents ")[2].split()
            assert [int(piece.partition("[")[0]) for piece in pieces] == there

    # An unreadable attempt hides no other.
    for length in ("21", "50"):
        journal = Journal(tmp_path)
        prefix = str(tmp_path / "corpus") if length == "50" else "gone"
        flags = given_flags(config) | {"--data-path": [prefix], "--train-iters": int(length)}
        flags["--of-another-version"] = 1
        journal.start(6, {"devices": "1 x CPU"}, flags)
        StepRecords(journal).after_step(state, taken(2.0))
        done = tool("why_step.py", 7, "--load", tmp_path)
        assert done.returncode == (2 if prefix == "gone" else 0)
    printed = done.stdout.splitlines()
    assert sum(line.endswith("ignored: --of-another-version") for line in printed) == 1
    assert "ignored" not in "".join(lines)
    at = printed.index("samples of attempt 4:")
    assert "no token files at gone" in printed[at + 1]
    assert "samples of attempt 1 and 3 and 5:" in printed
