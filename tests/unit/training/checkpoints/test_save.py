"""Saving checkpoints, with an engine that writes one small file."""

import errno
import json
import os
import shutil
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import pytest
from problems import problem
from steps import step
from tiny import tiny_config, tiny_plan

from megatron.checkpointing.manifest import MANIFEST, damage, published_tags, read_manifest
from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import (
    CheckpointError,
)
from megatron.training.checkpoints.save import Checkpoints
from megatron.training.checkpoints.save_directory import require_own, sole_writer


def test_the_manifest_holds_files_state_plan_config_and_versions(job):
    job.save(5)
    folder = job.directory / "global_step5"
    manifest = read_manifest(folder)
    assert [record.name for record in manifest.files] == ["more.txt", "weights.pt"]
    assert {file.name for file in folder.iterdir()} == {"more.txt", "weights.pt", MANIFEST}
    assert damage(folder, manifest.files) == []
    assert manifest.state == TrainState(iteration=5, samples=10)
    assert manifest.plan == json.loads(json.dumps(job.plan.to_dict()))
    assert manifest.config == json.loads(json.dumps(asdict(job.config)))
    assert manifest.partition_dims == {"weight": 1}
    assert manifest.versions["torch"] == version("torch")


def test_the_newest_checkpoint_is_verified_before_the_run_ends(job):
    job.save(5)
    file = job.directory / "global_step5" / "weights.pt"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with problem("on disk … global_step5/weights.pt … hash", CheckpointError):
        job.checkpoints.verify()
    job.save(10)
    job.checkpoints.verify()
    # Once is enough.
    (job.directory / "global_step10" / "weights.pt").write_bytes(b"")
    job.checkpoints.verify()


def test_a_file_that_cannot_be_opened_is_not_called_damaged(job, os_calls):
    job.save(5)
    os_calls("posix_fadvise", errno.EMFILE)
    with problem("Too many open", CheckpointError) as found:
        job.checkpoints.verify()
    assert "differs" not in str(found.value)
    assert "older checkpoint" not in str(found.value)


def test_verification_reads_the_disk_and_not_the_page_cache(job, monkeypatch):
    forgotten = set()

    def forget(descriptor, *place):
        assert place == (0, 0, os.POSIX_FADV_DONTNEED)
        forgotten.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "posix_fadvise", forget)
    job.save(5)
    assert job.resume().iteration == 5
    assert forgotten == set()
    names = {"weights.pt", "more.txt"}
    job.checkpoints.verify()
    assert forgotten == {job.directory / "global_step5" / name for name in names}
    forgotten.clear()
    plan = tiny_plan(*job.flags, "--keep-last", "1")
    checkpoints = Checkpoints(job.engine, plan, job.config)
    checkpoints.save(TrainState(iteration=10))
    checkpoints.after_step(TrainState(iteration=11), step(1.0))
    assert forgotten == {job.directory / "global_step10" / name for name in names}
    assert published_tags(job.directory) == ["global_step10"]


def test_a_run_that_was_rolled_back_can_end_at_once(job):
    for iteration in (5, 10):
        job.engine.module.weight.data.add_(1)
        job.save(iteration)
    job.checkpoints.rewind_to(5)
    job.save(5)
    job.checkpoints.verify()


def test_saving_is_due_at_multiples_of_the_interval(job):
    for iteration in range(1, 12):
        job.checkpoints.after_step(TrainState(iteration=iteration), step(1.0))
    assert published_tags(job.directory) == ["global_step10", "global_step5"]


def test_without_an_interval_no_step_is_saved(job):
    flags = ["--save", str(job.directory)]
    checkpoints = Checkpoints(job.engine, tiny_plan(*flags), tiny_config(*flags))
    for iteration in range(1, 12):
        checkpoints.after_step(TrainState(iteration=iteration), step(1.0))
    assert published_tags(job.directory) == []


def test_the_same_iteration_is_saved_once(job):
    job.save(5)
    before = (job.directory / "global_step5" / MANIFEST).stat().st_mtime_ns
    job.save(5)
    assert (job.directory / "global_step5" / MANIFEST).stat().st_mtime_ns == before


@pytest.mark.parametrize("flag", ["--no-save-optim", "--no-save-rng"])
def test_a_checkpoint_without_a_part_resumes_only_without_it(job, flag):
    part = "optimizer" if "optim" in flag else "streams"
    plan = tiny_plan(*job.flags, flag)
    checkpoints = Checkpoints(job.engine, plan, job.config)
    checkpoints.save(TrainState(iteration=5))
    assert [name for name, kept in job.engine.saved.items() if not kept] == [part]
    with problem(f"global_step5 … {flag} … --finetune", CheckpointError):
        job.resume()
    state = job.resume(flag.replace("save", "load"))
    assert state.iteration == 5
    assert [name for name, taken in job.engine.parts.items() if not taken] == [part]


def test_checkpoints_that_a_run_does_not_resume_from_are_not_replaced(job, tmp_path):
    elsewhere = ["--load", str(tmp_path / "base")]
    starts = [[], elsewhere, [*elsewhere, "--finetune"], [*elsewhere, "--spike-policy", "zscore=6"]]
    for more in starts:
        require_own(tiny_plan(*job.flags[:4], *more))
    job.save(5)
    require_own(job.plan)
    require_own(tiny_plan(*job.flags[:4], *elsewhere, "--eval-only"))
    require_own(tiny_plan())
    for more in starts:
        without = " without --finetune" if "--finetune" in more else " to resume"
        with problem(f"global_step5 … --load {job.directory}{without}", CheckpointError):
            require_own(tiny_plan(*job.flags[:4], *more))


def test_outdated_checkpoints_are_removed_after_verification(job, messages):
    job.save(5)
    plan = tiny_plan(*job.flags, "--keep-last", "2", "--keep-every", "20")
    checkpoints = Checkpoints(job.engine, plan, job.config, saved=5)
    for iteration in range(6, 41):
        checkpoints.after_step(TrainState(iteration=iteration), step(1.0))
    assert published_tags(job.directory) == [f"global_step{i}" for i in (40, 35, 20, 5)]
    assert (job.directory / "latest").read_text() == "global_step40"
    assert f"  removed the outdated checkpoint {job.directory / 'global_step10'}" in messages


def test_nothing_is_removed_when_the_new_checkpoint_is_damaged(job):
    job.save(5)
    plan = tiny_plan(*job.flags, "--keep-last", "1")
    checkpoints = Checkpoints(job.engine, plan, job.config)
    checkpoints.save(TrainState(iteration=10))
    (job.directory / "global_step10" / "weights.pt").write_bytes(b"")
    with problem("global_step10/weights.pt … 0 bytes", CheckpointError):
        checkpoints.after_step(TrainState(iteration=11), step(1.0))
    assert job.resume().iteration == 5


def test_a_full_disk_is_refused_before_anything_is_written(job, disk):
    job.save(5)
    disk(free=10, block=1)
    job.engine.saved = None
    with problem("bytes … 10 … free", CheckpointError):
        job.save(10)
    assert job.engine.saved is None
    assert not list(job.directory.glob("staging-*"))
    assert job.resume().iteration == 5


def test_a_disk_that_fills_up_leaves_the_older_checkpoints(job):
    job.save(5)

    def fill(directory, tag, client_state, **parts):
        (directory / tag / "weights.pt").write_text("half of it")
        raise RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed")

    job.engine.save = fill
    with problem("10 … file write failed … in staging-global_step10", CheckpointError):
        job.save(10)
    assert (job.directory / "staging-global_step10" / "weights.pt").exists()
    assert job.resume().iteration == 5


def test_a_second_writer_is_refused(job):
    refused = problem("--save … /runs … lock.json", CheckpointError)
    with sole_writer(job.plan), refused, sole_writer(job.plan):
        pass
    with sole_writer(job.plan), sole_writer(tiny_plan()):
        pass


def test_a_failed_write_of_the_manifest_removes_the_staging_folder(job, os_calls):
    job.save(5)
    os_calls("fsync", errno.ENOSPC, on=MANIFEST)
    with problem("iteration 10 … No space left … nothing is left", CheckpointError):
        job.save(10)
    # The room is given back.
    assert not list(job.directory.glob("staging-*"))
    assert job.resume().iteration == 5


@pytest.mark.parametrize("how", ["removed", "renamed", "emptied"])
def test_a_save_directory_that_disappears_ends_the_run(job, how):
    with sole_writer(job.plan):
        checkpoints = Checkpoints(job.engine, job.plan, job.config)
        checkpoints.save(TrainState(iteration=5))
        if how == "renamed":
            job.directory.rename(job.directory.with_name("other"))
        else:
            shutil.rmtree(job.directory)
        if how == "emptied":
            job.directory.mkdir()
        with problem("--save … lock.json … unmounted", CheckpointError):
            checkpoints.save(TrainState(iteration=10))
    assert not [*job.directory.glob("*")]


def test_a_read_only_save_directory_is_an_error(job, monkeypatch):
    def refused(*words, **named):
        raise PermissionError(1, "Operation not permitted")

    job.save(5)
    for iteration, name in enumerate(("mkdir", "rename", "replace"), 10):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, refused)
            with problem("--save … Operation not permitted", CheckpointError):
                job.save(iteration)
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", refused)
        with problem("--save … Operation not permitted", CheckpointError):
            job.save(15)
