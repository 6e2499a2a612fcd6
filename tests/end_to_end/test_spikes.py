"""A run that goes back before a spike equals one that passes over its samples from the start."""

import json
from pathlib import Path

import pytest
from jobs import Corpus, Finished, journal, start_ranks
from test_resume import assert_same_files

from megatron.training.loop.journal import read_journal

RUN = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--micro-batch-size", "1", "--global-batch-size", "4"),
    # So fast that some loss is far above the three before it.
    *("--lr", "0.2", "--train-iters", "12", "--eval-iters", "0", "--save-interval", "2"),
]
POLICY = "zscore=2,window=3,skip=2,after=1,max=9"


@pytest.fixture(scope="module")
def spiked(
    corpus: Corpus, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Finished, list[str]]:
    """A run that went back, in its directory, and its flags."""
    save = tmp_path_factory.mktemp("spiked")
    flags = [*RUN, *corpus.flags]
    job = start_ranks(1, *flags, "--save", str(save), "--spike-policy", POLICY).succeeded()
    return save, job, flags


def test_a_run_that_goes_back_equals_a_calm_one(
    spiked: tuple[Path, Finished, list[str]], tmp_path: Path
) -> None:
    save, job, flags = spiked
    actions = journal(save, "rollback")
    assert actions
    assert (
        f"(1 of at most 9)\nSkipped iterations {actions[0]['iteration'] + 1} to "
        in (job.outputs[0])
    )
    ranges = [f"{first}-{last}" for first, last in (action["passed_over"] for action in actions)]
    start_ranks(
        1, *flags, "--save", str(tmp_path), "--skip-train-iteration-range", *ranges
    ).succeeded()
    calm, gone_back = (steps_of(folder) for folder in (tmp_path, save))
    assert gone_back == calm
    assert_same_files(tmp_path / "global_step12", save / "global_step12")
    state = json.loads((save / "global_step12" / "manifest.json").read_text())["state"]
    assert state["spikes"] == [action["passed_over"] for action in actions]


def test_a_step_behind_a_spike_is_the_same_when_taken_again(
    spiked: tuple[Path, Finished, list[str]],
) -> None:
    save, _, flags = spiked
    before = (save / "journal.jsonl").read_bytes()
    number = steps_of(save)[-1][0]
    again = [*flags, "--save", str(save), "--load", str(save), "--replay-step", str(number)]
    (output,) = start_ranks(1, *again).succeeded().outputs
    assert f"step {number} equals the journal, bit for bit" in output
    assert output.count(" | documents ") == 4
    assert (save / "journal.jsonl").read_bytes() == before


def steps_of(save: Path) -> list[tuple[int, float, float]]:
    """Return what stands of the steps of a run."""
    return [
        (record["iteration"], record["lm_loss"], record["grad_norm"])
        for record in read_journal(save)
        if record["event"] == "step"
    ]
