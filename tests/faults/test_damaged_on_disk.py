"""What a checkpoint's files may suffer on disk: each damage is found, named, and lost nothing to."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from failing import cut_while_read
from forked import steps, without_head_start
from small_job import LAST, Job, is_same

from megatron.checkpointing.lock import hold_lock

NEWEST = f"global_step{LAST}"
MAIN = "mp_rank_00_model_states.pt"


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize("harm", [flip, truncate, os.unlink])
def test_each_damaged_file_is_named_and_the_older_checkpoint_goes_on(
    harm: Callable[[Path], None], keeping_job: Job, save: Path
) -> None:
    for file in sorted((save / NEWEST).iterdir()):
        run = Path(shutil.copytree(save, save.parent / f"{harm.__name__}-{file.name}"))
        harm(run / NEWEST / file.name)
        ended = keeping_job.run(run).succeeded()
        assert "at iteration 4\n" in ended.outputs[0], file.name
        # Without its manifest a folder is no checkpoint, and not reported.
        if (harm, file.name) != (os.unlink, "manifest.json"):
            assert f"{run / NEWEST} is skipped: " in ended.outputs[0]
            assert str(run / NEWEST / file.name) in ended.outputs[0]
        assert is_same(run, keeping_job.save)


def test_a_file_too_many_does_no_harm(keeping_job: Job, save: Path) -> None:
    (save / NEWEST / "notes.txt").write_text("kept by hand")
    shutil.copy(save / NEWEST / "notes.txt", save / "global_step4")
    shutil.rmtree(save / NEWEST)
    ended = keeping_job.run(save).succeeded()
    assert "at iteration 4\n" in ended.outputs[0]
    assert is_same(save, keeping_job.save)


def test_a_file_of_states_too_many_is_named(keeping_job: Job, save: Path) -> None:
    shutil.copy(save / NEWEST / MAIN, save / NEWEST / "mp_rank_01_model_states.pt")
    refused = keeping_job.run(save)
    assert refused.codes == [1]
    assert (
        f"{NEWEST} holds mp_rank_01_model_states.pt, which its manifest does" in refused.outputs[0]
    )
    # Who reads by the manifest's names does not see it.
    keeping_job.run(save, "--zero-stage", "1").succeeded()
    assert is_same(save, keeping_job.save)


@pytest.mark.parametrize("output", [None, b"\xff\x00", b"global_step999"])
def test_latest_is_put_right(keeping_job: Job, save: Path, output: bytes | None) -> None:
    shutil.rmtree(save / NEWEST)
    latest = save / "latest"
    latest.unlink() if output is None else latest.write_bytes(output)
    (save / "pruned-global_step2").mkdir()
    ended = keeping_job.run(save, "--exit-interval", "1")
    assert ended.codes == [0]
    assert "the folders are authoritative, and the newest is global_step4" in ended.outputs[0]
    assert latest.read_text() == "global_step5"
    keeping_job.run(save).succeeded()
    assert is_same(save, keeping_job.save)
    assert latest.read_text() == NEWEST
    # A run that has nothing left to do puts it in order too.
    latest.unlink() if output is None else latest.write_bytes(output)
    (save / "pruned-global_step2").mkdir()
    keeping_job.run(save).succeeded()
    assert latest.read_text() == NEWEST
    assert not [*save.glob("pruned-*")]


def test_two_runs_never_write_to_one_directory(keeping_job: Job, tmp_path: Path) -> None:
    with hold_lock(tmp_path / "run"):
        refused = keeping_job.run(tmp_path / "run")
    assert refused.codes == [1]
    assert f"another run writes there (process {os.getpid()} on" in refused.outputs[0]
    assert not list((tmp_path / "run").glob("global_step*"))


@pytest.mark.parametrize("more", [[], ["--num-layers", "2", "--pipeline-model-parallel-size", "2"]])
def test_a_directory_may_have_any_name(job_of_two: Job, tmp_path: Path, more: list[str]) -> None:
    save = tmp_path / "lr=1e-3 [a]*"
    job_of_two.run(save, *more, "--exit-interval", "4").succeeded()
    ended = job_of_two.run(save, *more).succeeded()
    assert "at iteration 4\n" in ended.outputs[0]
    assert more or is_same(save, job_of_two.save)


@pytest.mark.parametrize("damage", ["cut", "bit"])
def test_tokens_that_are_damaged_end_all_ranks_with_one_sentence(
    job_of_two: Job, tmp_path: Path, damage: str
) -> None:
    folder, save = tmp_path / "data", tmp_path / "run"
    shutil.copytree(job_of_two.save.parent, folder, ignore=lambda *_: [job_of_two.save.name])
    tokens, setup = folder / "corpus.bin", without_head_start
    if damage == "bit":  # the token stays in the vocabulary, and no loss looks odd
        flip(tokens)
    else:
        setup = partial(cut_while_read, str(tokens))
    ended = job_of_two.run(
        save, "--data-path", str(folder / "corpus"), "--data-cache-path", "", setup=setup
    )
    assert ended.codes == [2, 2], "\n".join(ended.outputs)
    sentence = {
        "cut": f"{tokens} was truncated while it was read: ",
        "bit": f"{tokens} is damaged: bytes 0 to {tokens.stat().st_size} are not what was written",
    }[damage]
    failure = json.loads((save / "failure.json").read_text())
    assert (failure["kind"], sentence in failure["message"]) == ("error", True)
    printed = "".join(ended.outputs)
    assert printed.count(sentence) >= 1
    assert "Traceback" not in printed


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that a checkpoint of the job nearly fills."""
    disk = tmp_path / "disk"
    disk.mkdir()
    size = "size=200k"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_ends_the_run_and_the_run_goes_on_when_there_is_room(
    keeping_job: Job, small_disk: Path
) -> None:
    save = small_disk / "run"
    ended = keeping_job.run(save)
    assert ended.codes == [1]
    assert "error: --save" in ended.outputs[0]
    newest = max(int(path.name.removeprefix("global_step")) for path in save.glob("global_step*"))
    assert newest < LAST
    # What was half written has given its room back.
    assert not [*save.glob("staging-*"), *save.glob("failure.json.*")]
    subprocess.run(["mount", "-o", "remount,size=9m", str(small_disk)], check=True)
    again = keeping_job.run(save).succeeded()
    assert f"at iteration {newest}\n" in again.outputs[0]
    assert is_same(save, keeping_job.save)
    assert len(steps(save)) == LAST
