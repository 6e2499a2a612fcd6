"""A directory of checkpoints with things in it that no run writes: named or removed, never awaited."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from problems import problem

from megatron.checkpointing.lock import hold_lock
from megatron.checkpointing.manifest import LATEST, LOCK, MANIFEST, published_tags, read_manifest
from megatron.checkpointing.publish import clear_staging, other_latest, publish
from megatron.common.errors import CheckpointError, UnreadableCheckpointError, WrongCheckpointError
from megatron.training.process.failure import FAILURE, FailureFile, failures_of


def make(kind: str, path: Path, elsewhere: Path) -> None:
    elsewhere.mkdir(exist_ok=True)
    (elsewhere / "precious").touch()
    if kind == "a file":
        path.write_text("")
    elif kind == "a link":
        path.symlink_to(elsewhere)
    elif kind == "a dangling link":
        path.symlink_to(path.parent / "nowhere")
    else:
        (path / "deep").mkdir(parents=True)


KINDS = ["a file", "a link", "a dangling link", "a folder"]


@pytest.mark.parametrize("kind", KINDS)
def test_leftovers_of_any_kind_give_way(tmp_path, kind):
    save, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    save.mkdir()
    names = [f"{left}-global_step{i}" for left in ("staging", "replaced", "pruned") for i in (5, 6)]
    for name in names:
        make(kind, save / name, elsewhere)
    # Where one was moved aside and nothing took its place, a folder comes back.
    (save / "global_step6").mkdir()
    staging = clear_staging(save, 5)
    assert (staging.is_dir(), list(staging.iterdir())) == (True, [])
    left = {"staging-global_step5", "global_step6"} | (
        {"global_step5"} if kind == "a folder" else set()
    )
    assert {path.name for path in save.iterdir()} == left
    assert (elsewhere / "precious").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_has_the_name_of_a_checkpoint_is_replaced(tmp_path, kind):
    save, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    staging = clear_staging(save, 5)
    (staging / MANIFEST).touch()
    make(kind, save / "global_step5", elsewhere)
    publish(save, 5)
    assert published_tags(save) == ["global_step5"]
    assert not (save / "global_step5").is_symlink()
    assert {path.name for path in save.iterdir()} == {"global_step5", LATEST}
    assert (elsewhere / "precious").exists()


def test_fifos_are_named_and_not_waited_for(tmp_path):
    folder = tmp_path / "global_step5"
    folder.mkdir()
    for file in (folder / MANIFEST, tmp_path / LATEST, tmp_path / LOCK, tmp_path / FAILURE):
        os.mkfifo(file)
    with problem("manifest.json … not a regular file", CheckpointError) as message:
        read_manifest(folder)
    assert not isinstance(message.value, UnreadableCheckpointError)
    assert other_latest(tmp_path, "global_step5") == "nothing: it is missing"
    assert failures_of(tmp_path) == []
    with hold_lock(tmp_path, silence_s=0.1):
        assert (tmp_path / LOCK).is_file()


def test_a_folder_named_like_the_failure_file_is_reported(tmp_path):
    (tmp_path / FAILURE).mkdir()
    with problem("failure.json … not a regular file … move it", WrongCheckpointError):
        FailureFile(str(tmp_path)).put_stale_away()
    assert (tmp_path / FAILURE).is_dir()


def test_a_failure_file_that_cannot_be_renamed_is_reported(tmp_path, os_calls):
    (tmp_path / FAILURE).write_text("{}")
    file = FailureFile(str(tmp_path))
    os_calls("rename", errno.EPERM)
    with problem("Operation not permitted … move it away", WrongCheckpointError):
        file.put_stale_away()


def test_a_lock_that_cannot_be_removed_ends_no_run(tmp_path, os_calls, caplog):
    with hold_lock(tmp_path):
        os_calls("unlink", errno.EPERM)
    assert "lock of this run" in caplog.text


def test_a_stopped_owner_of_the_lock_is_reported(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from megatron.checkpointing.lock import hold_lock\n"
        "with hold_lock(Path(sys.argv[1])): print(1, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as owner:
        try:
            assert owner.stdout.readline() == "1\n"
            with problem(f"{owner.pid} … since … lock.json", CheckpointError), hold_lock(tmp_path):
                pass
            owner.send_signal(signal.SIGSTOP)
            while "State:\tT" not in Path(f"/proc/{owner.pid}/status").read_text():
                time.sleep(0.01)
            with problem(f"stopped … kill -CONT {owner.pid}", CheckpointError), hold_lock(tmp_path):
                pass
        finally:
            owner.kill()


def refused(*words, **named):
    raise PermissionError(1, "Operation not permitted", str(words[0]))
