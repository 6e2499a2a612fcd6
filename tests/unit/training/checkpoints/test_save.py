"""Saving and resuming, with an engine that writes one small file."""

import errno
import json
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from steps import step
from tiny import tiny_config, tiny_plan
from torch import nn

from megatron.checkpointing import publish
from megatron.checkpointing.manifest import MANIFEST, damage, published_tags, read_manifest
from megatron.checkpointing.saved_run import checkpoint_flags
from megatron.common.errors import (
    CheckpointError,
    ExitCode,
    UnreadableCheckpointError,
    WrongCheckpointError,
)
from megatron.data.datasets.datasets import CorpusUse
from megatron.tensor_parallel.sharding import mark_sharded
from megatron.training import pretrain
from megatron.training.checkpoints.checkpoint_choice import choose_checkpoint
from megatron.training.checkpoints.resume import resume
from megatron.training.checkpoints.save import Checkpoints
from megatron.training.checkpoints.save_directory import require_own, sole_writer
from megatron.training.guards.loss_spikes import Spike, go_back
from megatron.training.loop.journal import Journal, read_journal
from megatron.training.loop.state import TrainState
from megatron.training.process.failure import FailureFile
from megatron.training.process.watchdog import Watchdog


class FakeEngine:
    """One sharded weight; loading remembers what was asked for."""

    def __init__(self, group):
        self.module = nn.Linear(2, 2)
        mark_sharded(self.module.weight, 1, group)
        self.loaded = []

    def save(self, directory, tag, client_state, *, optimizer, streams, write):
        self.saved = {"optimizer": optimizer, "streams": streams}
        (directory / tag).mkdir(exist_ok=True)
        write(self.module.state_dict(), directory / tag / "weights.pt")
        (directory / tag / "more.txt").write_text(str(client_state))

    def load(self, directory, tag, *, read, optimizer, streams):
        self.loaded.append((directory, tag))
        self.parts = {"optimizer": optimizer, "streams": streams}


@pytest.fixture
def job(tmp_path, group):
    """A run that saves to and loads from one directory, every 5 iterations."""

    class Job:
        directory = tmp_path / "runs"
        flags = ["--save", str(directory), "--save-interval", "5", "--load", str(directory)]

        def __init__(self):
            self.engine = FakeEngine(group)
            self.plan = tiny_plan(*self.flags)
            self.config = tiny_config(*self.flags)
            self.checkpoints = Checkpoints(self.engine, self.plan, self.config)

        def save(self, iteration):
            self.checkpoints.save(TrainState(iteration=iteration, samples=2 * iteration))

        def resume(self, *flags):
            state = TrainState()
            plan = tiny_plan(*self.flags, *flags)
            if chosen := choose_checkpoint(plan):
                resume(self.engine, plan, state, chosen)
            return state

    return Job()


def test_a_checkpoint_lists_all_its_files_and_who_wrote_it(job):
    job.save(5)
    folder = job.directory / "global_step5"
    manifest = read_manifest(folder)
    assert [record.name for record in manifest.files] == ["more.txt", "weights.pt"]
    assert {file.name for file in folder.iterdir()} == {"more.txt", "weights.pt", MANIFEST}
    assert damage(folder, manifest.files) == []
    assert manifest.state == asdict(TrainState(iteration=5, samples=10)) | {"spikes": []}
    assert manifest.plan == json.loads(json.dumps(asdict(job.plan)))
    assert manifest.config == json.loads(json.dumps(asdict(job.config)))
    assert manifest.partition_dims == {"weight": 1}
    assert manifest.versions["torch"] == torch.__version__


def test_what_was_written_last_is_read_again_before_the_run_leaves(job):
    job.save(5)
    file = job.directory / "global_step5" / "weights.pt"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match="not what the disk holds.*weights.pt"):
        job.checkpoints.verify()
    job.save(10)
    job.checkpoints.verify()
    # Once is enough.
    (job.directory / "global_step10" / "weights.pt").write_bytes(b"")
    job.checkpoints.verify()


def test_what_is_read_again_comes_from_the_disk_and_not_from_memory(job, monkeypatch):
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


def test_a_run_that_has_gone_back_may_leave_at_once(job):
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


def test_a_run_goes_on_from_the_newest(job, told):
    job.save(5)
    job.save(10)
    assert job.resume() == TrainState(iteration=10, samples=20)
    assert job.engine.loaded == [(job.directory, "global_step10")]
    assert told[-1] == (f"  successfully loaded checkpoint from {job.directory} at iteration 10")


def test_a_damaged_checkpoint_is_passed_over_and_said(job, told):
    job.save(5)
    job.save(10)
    (job.directory / "global_step10" / "weights.pt").write_bytes(b"")
    assert job.resume("--seed", "99") == TrainState(iteration=5, samples=10)
    assert job.engine.loaded == [(job.directory, "global_step5")]
    (settings,) = [text for text in told if "other settings" in text]
    assert "going on from" in settings and "global_step5 " in settings
    (warning,) = [text for text in told if "passed over" in text]
    assert "global_step10 is passed over: " in warning
    assert "weights.pt has 0 bytes instead of " in warning


def test_a_damaged_manifest_is_passed_over_too(job, told):
    job.save(5)
    job.save(10)
    (job.directory / "global_step10" / MANIFEST).write_text("{")
    assert job.resume().iteration == 5
    assert [text for text in told if "global_step10" in text and "passed over" in text]


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), "manifest.json"),
        (OSError(errno.EIO, "Input/output error"), "manifest.json"),
        (PermissionError(errno.EACCES, "Permission denied"), ""),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_not_taken_for_damaged(job, monkeypatch, error, name):
    job.save(5)
    job.save(10)
    file = job.directory / "global_step10" / name
    asks, opens = Path.stat, Path.open

    def refused(self, usual, *words, **how):
        if self == file or file in self.parents:
            raise error
        return usual(self, *words, **how)

    monkeypatch.setattr(Path, "open", lambda self, *words: refused(self, opens, *words))
    if not name:
        monkeypatch.setattr(Path, "stat", lambda self, **how: refused(self, asks, **how))
    told = rf"global_step10/manifest.json cannot be read: {error.strerror}"
    with pytest.raises(UnreadableCheckpointError, match=told) as raised:
        job.resume()
    assert raised.value.exit_code is ExitCode.FAILED
    with pytest.raises(UnreadableCheckpointError, match=told):
        checkpoint_flags(["--use-checkpoint-args", "--load", str(job.directory)])
    monkeypatch.undo()
    assert job.resume().iteration == 10


def test_a_directory_that_cannot_be_read_is_not_taken_for_an_empty_one(job, monkeypatch):
    job.save(5)

    def refused(place):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "listdir", refused)
    with pytest.raises(UnreadableCheckpointError, match="runs cannot be read: Permission denied"):
        job.resume()


@pytest.mark.parametrize("hint", [None, "global_step900", "\0\xff", "global_step5\n"])
def test_the_folders_count_and_not_what_latest_says(job, told, hint):
    job.save(5)
    job.save(10)
    latest = job.directory / "latest"
    latest.unlink() if hint is None else latest.write_text(hint)
    assert job.resume().iteration == 10
    (warning,) = [text for text in told if "latest in" in text]
    assert "the newest is global_step10" in warning


def test_the_first_job_of_a_chain_starts_from_the_beginning(job, told):
    assert job.resume() == TrainState()
    assert job.engine.loaded == []
    assert told == [f"no checkpoint in {job.directory} yet: training starts from the beginning"]


def test_nothing_to_load_is_an_error_when_it_is_not_the_directory_to_save_to(job, tmp_path):
    nowhere = tmp_path / "nowhere"
    with pytest.raises(CheckpointError, match="--load .*nowhere: there is no such directory"):
        job.resume("--load", str(nowhere))
    nowhere.mkdir()
    with pytest.raises(CheckpointError, match="nowhere holds no complete checkpoint; give"):
        job.resume("--load", str(nowhere))


def test_checkpoints_that_are_all_damaged_are_no_beginning(job):
    # Starting over would replace them one by one.
    job.save(5)
    (job.directory / "global_step5" / "weights.pt").unlink()
    with pytest.raises(CheckpointError, match="global_step5"):
        job.resume()


def test_another_network_is_refused_before_anything_is_loaded(job):
    job.save(5)
    with pytest.raises(CheckpointError, match="--num-layers +2 +4"):
        job.resume("--num-layers", "4")
    assert job.engine.loaded == []


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--num-layers", "4"], "--num-layers +2 +4"),
        (["--bf16"], "--bf16|--fp16|dtype"),
        (["--optimizer", "sgd"], "--optimizer +adam +sgd"),
    ],
)
def test_a_wrong_load_is_told_before_data_and_network_are_built(job, monkeypatch, flags, told):
    job.save(5)

    def too_late(*words):
        raise AssertionError("something was built before")

    for name in ("build_process_groups", "read_datasets", "build_engine"):
        monkeypatch.setattr(pretrain.setup, name, too_late)
    words = dict.fromkeys(("padding_counts", "tokenizer", "objective", "kernels", "device"))
    words["watchdog"] = Watchdog(FailureFile(""), rank=0)
    with pytest.raises(CheckpointError, match=told):
        pretrain._build(tiny_plan(*job.flags, *flags), **words)


def test_checkpoints_that_a_run_does_not_go_on_from_are_not_replaced(job, tmp_path):
    elsewhere = ["--load", str(tmp_path / "base")]
    starts = [[], elsewhere, [*elsewhere, "--finetune"], [*elsewhere, "--spike-policy", "zscore=6"]]
    for more in starts:
        require_own(tiny_plan(*job.flags[:4], *more))
    job.save(5)
    require_own(job.plan)
    require_own(tiny_plan(*job.flags[:4], *elsewhere, "--eval-only"))
    require_own(tiny_plan())
    for more in starts:
        without = " without --finetune" if "--finetune" in more else " to go on"
        told = re.escape("(the newest is global_step5)") + ".*" + f"--load {job.directory}{without}"
        with pytest.raises(CheckpointError, match=told):
            require_own(tiny_plan(*job.flags[:4], *more))


@pytest.mark.parametrize("flag", ["--no-save-optim", "--no-save-rng"])
def test_a_checkpoint_without_a_part_is_for_who_does_not_want_it(job, flag):
    part = "optimizer" if "optim" in flag else "streams"
    plan = tiny_plan(*job.flags, flag)
    checkpoints = Checkpoints(job.engine, plan, job.config)
    checkpoints.save(TrainState(iteration=5))
    assert [name for name, kept in job.engine.saved.items() if not kept] == [part]
    with pytest.raises(CheckpointError, match=f"was saved with {flag}: write"):
        job.resume()
    state = job.resume(flag.replace("save", "load"))
    assert state.iteration == 5
    assert [name for name, taken in job.engine.parts.items() if not taken] == [part]


def test_progress_can_begin_anew(job, tmp_path):
    job.save(5)
    elsewhere = ["--save", str(tmp_path / "elsewhere")]
    assert job.resume("--reset-progress", *elsewhere) == TrainState()
    assert job.engine.parts == {"optimizer": True, "streams": True}
    assert job.resume("--finetune", *elsewhere) == TrainState()
    assert job.engine.parts == {"optimizer": False, "streams": False}


def test_a_missing_checkpoint_can_be_an_error_at_the_first_start_too(job):
    assert job.resume() == TrainState()
    with pytest.raises(CheckpointError, match="there is no such directory"):
        job.resume("--exit-on-missing-checkpoint")


def test_weights_alone_can_be_finetuned_with_another_optimizer(job, tmp_path):
    job.save(5)
    with pytest.raises(CheckpointError, match="--optimizer +adam +sgd"):
        job.resume("--optimizer", "sgd")
    elsewhere = ["--save", str(tmp_path / "elsewhere")]
    assert job.resume("--optimizer", "sgd", "--finetune", *elsewhere) == TrainState()


def test_old_checkpoints_go_when_the_new_one_is_verified(job, told):
    job.save(5)
    plan = tiny_plan(*job.flags, "--keep-last", "2", "--keep-every", "20")
    checkpoints = Checkpoints(job.engine, plan, job.config, saved=5)
    for iteration in range(6, 41):
        checkpoints.after_step(TrainState(iteration=iteration), step(1.0))
    assert published_tags(job.directory) == [f"global_step{i}" for i in (40, 35, 20, 5)]
    assert (job.directory / "latest").read_text() == "global_step40"
    assert f"  removed the outdated checkpoint {job.directory / 'global_step10'}" in told


def test_nothing_goes_when_the_new_one_is_not_what_was_written(job, monkeypatch):
    job.save(5)
    plan = tiny_plan(*job.flags, "--keep-last", "1")
    publish_whole = publish.publish

    def publish_and_break(directory, iteration):
        publish_whole(directory, iteration)
        (directory / f"global_step{iteration}" / "weights.pt").write_bytes(b"")

    monkeypatch.setattr(publish, "publish", publish_and_break)
    checkpoints = Checkpoints(job.engine, plan, job.config)
    checkpoints.save(TrainState(iteration=10))
    with pytest.raises(CheckpointError, match="weights.pt has 0 bytes .*"):
        checkpoints.after_step(TrainState(iteration=11), step(1.0))
    assert job.resume().iteration == 5


def test_a_disk_without_room_is_refused_before_anything_is_written(job, monkeypatch):
    job.save(5)
    full = SimpleNamespace(f_frsize=1, f_bavail=10, f_files=0, f_favail=0)
    monkeypatch.setattr(os, "statvfs", lambda directory: full)
    job.engine.saved = None
    with pytest.raises(CheckpointError, match=r"needs [\d,]+ bytes and 10 are free"):
        job.save(10)
    assert job.engine.saved is None
    assert not list(job.directory.glob("staging-*"))
    assert job.resume().iteration == 5


def test_a_disk_that_fills_up_while_writing_leaves_the_older_checkpoints(job, monkeypatch):
    job.save(5)

    def fill(directory, tag, client_state, **parts):
        (directory / tag / "weights.pt").write_text("half of it")
        raise RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed")

    monkeypatch.setattr(job.engine, "save", fill)
    told = "iteration 10 cannot be written .*file write failed.*in staging-global_step10, goes with"
    with pytest.raises(CheckpointError, match=told):
        job.save(10)
    assert (job.directory / "staging-global_step10" / "weights.pt").exists()
    assert job.resume().iteration == 5


def test_another_run_that_writes_to_the_directory_is_refused(job):
    refused = pytest.raises(CheckpointError, match="another run writes there")
    with sole_writer(job.plan), refused, sole_writer(job.plan):
        pass
    with sole_writer(job.plan), sole_writer(tiny_plan()):
        pass


def test_a_run_goes_on_from_the_step_asked_for_and_keeps_what_came_behind(job, told):
    for iteration in (5, 10, 15):
        job.save(iteration)
    assert job.resume("--ckpt-step", "5") == TrainState(iteration=5, samples=10)
    assert published_tags(job.directory) == ["global_step5"]
    assert (job.directory / "latest").read_text() == "global_step5"
    assert (job.directory / "aside-global_step15" / MANIFEST).exists()
    assert "aside-global_step15, aside-global_step10" in told[-1]
    # Once more, after the same steps were taken again.
    job.checkpoints = Checkpoints(job.engine, job.plan, job.config, saved=5)
    job.save(10)
    job.resume("--ckpt-step", "5")
    assert (job.directory / "aside-2-global_step10" / MANIFEST).exists()
    with pytest.raises(CheckpointError, match="--ckpt-step 10: .* but global_step5$"):
        job.resume("--ckpt-step", "10")


def test_nothing_is_set_aside_by_who_only_evaluates(job):
    job.save(5)
    job.save(10)
    assert job.resume("--ckpt-step", "5", "--eval-only") == TrainState(iteration=5, samples=10)
    assert published_tags(job.directory) == ["global_step10", "global_step5"]


def test_what_another_run_is_about_to_replace_is_left_to_it(job, tmp_path):
    job.save(5)
    (job.directory / "global_step5").rename(job.directory / "replaced-global_step5")
    reads = ["--save", str(tmp_path / "elsewhere")]
    with sole_writer(job.plan), pytest.raises(CheckpointError, match="no complete checkpoint"):
        job.resume(*reads)
    assert job.resume(*reads).iteration == 5


def test_from_a_disk_that_is_only_read_a_run_goes_on_where_nothing_must_be_written(
    job, tmp_path, monkeypatch
):
    job.save(5)
    job.save(10)

    def refused(source, target):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(source))

    monkeypatch.setattr(os, "rename", refused)
    monkeypatch.setattr(shutil, "rmtree", lambda folder: refused(folder, None))
    replaced = job.directory / "replaced-global_step10"
    replaced.mkdir()
    reads = ["--save", str(tmp_path / "elsewhere")]
    assert job.resume(*reads).iteration == 10
    replaced.rmdir()
    (job.directory / "global_step10").replace(replaced)
    with pytest.raises(WrongCheckpointError, match="lost its name.* Read-only file system: .*re"):
        job.resume(*reads)


def test_a_manifest_that_cannot_be_written_ends_all_ranks_alike(job, monkeypatch):
    job.save(5)

    def fill(folder, manifest):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(publish, "write_manifest", fill)
    told = "of iteration 10 cannot be written .*No space left.* and nothing is left of it"
    with pytest.raises(CheckpointError, match=told):
        job.save(10)
    # The room is given back.
    assert not list(job.directory.glob("staging-*"))
    assert job.resume().iteration == 5


def test_another_directory_keeps_its_newer_checkpoints(job, tmp_path):
    job.save(5)
    job.save(10)
    job.resume("--ckpt-step", "5", "--save", str(tmp_path / "elsewhere"))
    assert published_tags(job.directory) == ["global_step10", "global_step5"]


def test_a_damaged_checkpoint_of_the_step_asked_for_has_no_stand_in(job):
    job.save(5)
    job.save(10)
    (job.directory / "global_step10" / "weights.pt").unlink()
    with pytest.raises(WrongCheckpointError, match=r"is whole \(global_step10 is damaged\)"):
        job.resume("--ckpt-step", "10")


def test_a_run_goes_back_behind_damaged_checkpoints(job, told):
    for iteration in (5, 10, 15, 20):
        job.save(iteration)
    (job.directory / "global_step15" / "weights.pt").write_bytes(b"")
    (job.directory / "global_step10" / MANIFEST).write_text("{")
    state = TrainState(iteration=17, spikes=((2, 3),))
    plan = tiny_plan(*job.flags, "--spike-policy", "rollback=1")
    journal = Journal(job.directory)
    go_back(job.engine, plan, state, Spike(17, "loss 9"), journal)
    assert state == TrainState(iteration=5, samples=10, spikes=((2, 3), (17, 17)))
    assert job.engine.loaded == [(job.directory, "global_step5")]
    assert len([text for text in told if "passed over: " in text]) == 2
    (record,) = read_journal(job.directory)
    assert record["passed_over"] == [17, 17]
    assert record["all_passed_over"] == [[2, 3], [17, 17]]


def test_passed_over_spikes_are_part_of_the_state(job):
    job.checkpoints.save(TrainState(iteration=5, spikes=((3, 4),)))
    assert job.resume() == TrainState(iteration=5, spikes=((3, 4),))


def test_another_order_of_samples_is_told_when_a_run_goes_on(job, told):
    job.save(5)
    use = CorpusUse("corpus", 1.0, 1.0, 4, tokens=61, samples_wanted=20, epochs=2.0, size_for=int)
    for flags, reason in (
        ([], ""),
        (["--seed", "7"], "--seed was 1234 and is 7"),
        (["--train-iters", "5"], "corpus is shuffled over 1 epoch, and was over 2"),
        (["--train-iters", "5", "--finetune", "--save", "elsewhere"], ""),
    ):
        told.clear()
        plan = tiny_plan(*job.flags, "--override-opt_param-scheduler", *flags)
        resume(job.engine, plan, TrainState(), choose_checkpoint(plan), uses=[use])
        warnings = [line for line in told if "come in another order" in line]
        assert len(warnings) == bool(reason)
        assert all(reason in line and "--exit-interval" in line for line in warnings)


def test_a_run_with_the_other_sample_order_is_refused_before_it_reads(job):
    job.save(5)
    other = (*job.flags, "--sample-order", "megatron-core", "--override-opt_param-scheduler")
    with pytest.raises(
        WrongCheckpointError, match="write --sample-order bigscience, or --finetune"
    ):
        choose_checkpoint(tiny_plan(*other))
    assert choose_checkpoint(tiny_plan(*other, "--finetune", "--save", "elsewhere"))
    assert choose_checkpoint(tiny_plan(*other, "--eval-only"))


def test_many_damaged_checkpoints_are_told_in_a_few_lines(job, told):
    job.save(5)
    for iteration in range(1000, 1300):
        folder = job.directory / f"global_step{iteration}"
        shutil.copytree(job.directory / "global_step5", folder)
        # Every other one has a whole manifest.
        (folder / ("weights.pt" if iteration % 2 else MANIFEST)).write_bytes(b"?")
    assert job.resume().iteration == 5
    assert len([text for text in told if "is passed over" in text]) == 11
    shutil.rmtree(job.directory / "global_step5")
    told.clear()
    with pytest.raises(CheckpointError, match="is whole") as error:
        job.resume()
    assert "and 290 others are damaged" in str(error.value)
    assert len([text for text in told if "is passed over" in text]) == 11
    with pytest.raises(CheckpointError, match="but .* and 290 others"):
        job.resume("--ckpt-step", "7")


@pytest.mark.parametrize("how", ["removed", "renamed", "emptied"])
def test_a_directory_that_is_gone_while_the_run_goes_on_is_noticed(job, how):
    with sole_writer(job.plan):
        checkpoints = Checkpoints(job.engine, job.plan, job.config)
        checkpoints.save(TrainState(iteration=5))
        if how == "renamed":
            job.directory.rename(job.directory.with_name("other"))
        else:
            shutil.rmtree(job.directory)
        if how == "emptied":
            job.directory.mkdir()
        with pytest.raises(CheckpointError, match="was removed, renamed, emptied or unmounted"):
            checkpoints.save(TrainState(iteration=10))
    assert not [*job.directory.glob("*")]


def test_a_directory_that_becomes_read_only_is_told_in_one_sentence(job, monkeypatch):
    def refused(*words, **named):
        raise PermissionError(1, "Operation not permitted")

    job.save(5)
    for iteration, name in enumerate(("mkdir", "rename", "replace"), 10):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, refused)
            with pytest.raises(CheckpointError, match="--save .*Operation not permitted"):
                job.save(iteration)
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", refused)
        with pytest.raises(CheckpointError, match="--save .*Operation not permitted"):
            job.save(15)
