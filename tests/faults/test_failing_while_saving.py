"""A run that fails while it saves in the background finishes the checkpoint first."""

import json
from functools import partial
from pathlib import Path

import pytest
from failing import fails_in_step, without_patience
from forked import FLUSH, Killed, without_head_start
from small_job import Job, is_same

from megatron.checkpointing.manifest import damage, iteration_of, published_tags, read_manifest
from megatron.training.process.failure import FAILURE

BEHIND = ["--async-save", "--max-nan-steps", "1"]
OWN_FILE = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize(
    ("failing", "output"),
    [("loss", "consecutive steps with NaN or infinity"), ("data", "no such sample")],
)
def test_a_checkpoint_under_way_is_finished_before_a_run_fails(
    job_of_two: Job, tmp_path: Path, failing: str, output: str
) -> None:
    save = tmp_path / "failing"
    ended = job_of_two.run(save, *BEHIND, setup=partial(fails_in_step, failing, 1, 3))
    printed = "\n".join(ended.outputs)
    assert ended.codes == [1, 1], printed
    # The cause, not what came of it on the other rank.
    assert output in json.loads((save / FAILURE).read_text())["message"], printed
    assert "successfully saved checkpoint at iteration       2" in ended.outputs[0]
    (newest,) = published_tags(save)
    assert iteration_of(newest) == 2
    folder = save / newest
    assert damage(folder, read_manifest(folder).files) == []
    assert {file.name for file in folder.iterdir()} == {
        *(record.name for record in read_manifest(folder).files),
        "manifest.json",
    }
    job_of_two.run(save).succeeded()
    assert is_same(save, job_of_two.save)


@pytest.mark.parametrize(
    ("rank", "event", "stands"),
    [
        # Rank 0 has written its files, and rank 1 has not.
        (1, f"{FLUSH} staging-global_step4/{OWN_FILE}", 2),
        (0, f"{FLUSH} staging-global_step4/manifest.json", 2),
        (0, "os.rename latest.staging to latest", 4),
    ],
)
def test_what_is_being_published_counts_when_all_of_it_is_on_disk(
    job_of_two: Job, tmp_path: Path, rank: int, event: str, stands: int
) -> None:
    save = tmp_path / "killed"
    number = int(event.startswith("os.rename latest"))  # the second one is of iteration 4
    killed = Killed(number, rank=rank, only=event)
    setup = partial(without_patience, 1)
    ended = job_of_two.run(save, "--async-save", killed=killed, setup=setup)
    assert ended.codes[rank] == -9, "\n".join(ended.outputs)
    newest = published_tags(save)[0]
    assert iteration_of(newest) == stands
    assert damage(save / newest, read_manifest(save / newest).files) == []
    again = job_of_two.run(save, "--async-save").succeeded()
    assert f"at iteration {stands}\n" in again.outputs[0]
    assert is_same(save, job_of_two.save)


def test_a_rank_that_is_killed_is_told_by_those_that_stay(job_of_two: Job, tmp_path: Path) -> None:
    save = tmp_path / "killed"
    # Half of the events of its files: in the middle of the run.
    killed = Killed(len(job_of_two.events[1]) // 2, rank=1)
    ended = job_of_two.run(save, killed=killed, setup=without_head_start)
    assert ended.codes == [1, -9]
    failure = json.loads((save / FAILURE).read_text())
    assert (failure["kind"], failure["rank"]) == ("lost rank", 1)
    assert failure["message"].startswith(f"rank 1 (process {failure['pid']} on {failure['host']})")
    assert "ended without a message" in failure["message"]
    assert "; rank 0 then failed with: " in failure["message"]
    assert f"ERROR [rank 0]: {failure['message'][:40]}" in ended.outputs[0]
    job_of_two.run(save).succeeded()
    assert is_same(save, job_of_two.save)
