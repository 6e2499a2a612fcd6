"""Saving in the background, with an engine that writes one small file and a disk that can wait."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from problems import problem, require_problem
from steps import step
from tiny import tiny_config, tiny_plan
from torch import nn

from megatron.checkpointing import publish, writer
from megatron.checkpointing.manifest import (
    Manifest,
    damage,
    published_tags,
    read_manifest,
    record_file,
)
from megatron.checkpointing.publish import clear_staging
from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import CheckpointError
from megatron.training.checkpoints.emergency_save import PendingSave, finish_alone
from megatron.training.checkpoints.save import Checkpoints


class FakeEngine:
    """One weight, and a file that DeepSpeed would copy by itself."""

    def __init__(self):
        self.module = nn.Linear(200, 200)

    def partition_dims(self):
        return {}

    def save(self, directory, tag, client_state, *, optimizer, streams, write):
        write(self.module.state_dict(), directory / tag / "weights.pt")
        (directory / tag / "offloaded").mkdir()
        (directory / tag / "offloaded" / "copied").write_text("by itself")


@pytest.fixture
def disk(monkeypatch):
    """Writes that wait until they may go on, and fail if they shall."""

    class Disk:
        open = threading.Event()
        fails = None

    def write_later(state, file):
        assert Disk.open.wait(30)
        if Disk.fails:
            raise Disk.fails
        return write_state(state, file)

    write_state = writer.write_state
    monkeypatch.setattr(writer, "write_state", write_later)
    yield Disk
    Disk.open.set()


@pytest.fixture
def slow_manifest(monkeypatch):
    """A manifest whose flush waits until it may go on, and fails if it shall."""

    class Slow:
        begun, open = threading.Event(), threading.Event()
        fails = None

    def write_later(folder, manifest):
        Slow.begun.set()
        assert Slow.open.wait(30)
        if Slow.fails:
            raise Slow.fails
        write_manifest(folder, manifest)

    write_manifest = publish.write_manifest
    monkeypatch.setattr(publish, "write_manifest", write_later)
    yield Slow
    Slow.open.set()


@pytest.fixture
def start(group, tmp_path):
    """Return a function from flags to an engine and what saves it."""

    def started(*flags, to="async"):
        words = ["--save", str(tmp_path / to), "--save-interval", "5", *flags]
        engine = FakeEngine()
        return engine, Checkpoints(engine, tiny_plan(*words), tiny_config(*words))

    return started


def after(checkpoints, iteration, loss=1.0):
    checkpoints.after_step(TrainState(iteration=iteration), step(loss))


def until(is_reached, checkpoints, *, steps=3000):
    """Take steps until something has happened."""
    for iteration in range(1001, 1001 + 5 * steps, 5):
        if is_reached():
            return
        time.sleep(0.01)
        after(checkpoints, iteration)
    raise TimeoutError


def test_training_goes_on_while_a_checkpoint_is_written(start, disk, tmp_path):
    engine, checkpoints = start("--async-save")
    expected = engine.module.weight.detach().clone()
    after(checkpoints, 5)
    with torch.no_grad():
        engine.module.weight.zero_()
    after(checkpoints, 6)
    assert published_tags(tmp_path / "async") == []
    disk.open.set()
    until(lambda: not checkpoints.is_under_way, checkpoints)
    assert published_tags(tmp_path / "async") == ["global_step5"]
    read = torch.load(tmp_path / "async" / "global_step5" / "weights.pt")
    assert torch.equal(read["weight"], expected)


def test_training_goes_on_while_a_checkpoint_is_published(start, slow_manifest, tmp_path):
    _, checkpoints = start("--async-save")
    after(checkpoints, 5)
    until(slow_manifest.begun.is_set, checkpoints)
    for iteration in (6, 7):
        after(checkpoints, iteration)
    assert checkpoints.is_under_way
    assert published_tags(tmp_path / "async") == []
    slow_manifest.open.set()
    until(lambda: not checkpoints.is_under_way, checkpoints)
    assert published_tags(tmp_path / "async") == ["global_step5"]


def test_a_checkpoint_that_cannot_be_published_ends_the_run(start, slow_manifest, tmp_path):
    _, checkpoints = start("--async-save")
    slow_manifest.open.set()
    after(checkpoints, 5)
    checkpoints.finish()
    slow_manifest.fails = OSError(28, "No space left on device")
    after(checkpoints, 10)
    with problem("iteration 10 … rank 0: manifest.json: No space", CheckpointError):
        until(lambda: False, checkpoints)
    checkpoints.rescue()  # has nothing to do
    assert published_tags(tmp_path / "async") == ["global_step5"]


def test_a_run_that_fails_waits_for_what_is_being_published(
    start, slow_manifest, tmp_path, messages
):
    _, checkpoints = start("--async-save")
    after(checkpoints, 5)
    until(slow_manifest.begun.is_set, checkpoints)
    threading.Timer(0.2, slow_manifest.open.set).start()
    checkpoints.rescue()
    folder = tmp_path / "async" / "global_step5"
    assert damage(folder, read_manifest(folder).files) == []
    assert (tmp_path / "async" / "latest").read_text() == "global_step5"
    assert len([text for text in messages if "successfully saved" in text]) == 1


def test_the_files_are_those_of_a_save_that_training_waits_for(start, tmp_path):
    (engine, behind), (other, waited_for) = start("--async-save"), start(to="sync")
    other.module.load_state_dict(engine.module.state_dict())
    for checkpoints in (behind, waited_for):
        after(checkpoints, 5)
        checkpoints.finish()
    one, two = (read_manifest(tmp_path / to / "global_step5") for to in ("async", "sync"))
    assert one.files == two.files
    assert [record.name for record in one.files] == ["offloaded/copied", "weights.pt"]
    assert one.state == two.state == replace(two.state, iteration=5)


def test_the_next_save_and_the_end_wait_for_the_one_before(start, disk, tmp_path):
    _, checkpoints = start("--async-save")
    after(checkpoints, 5)
    threading.Timer(0.2, disk.open.set).start()
    after(checkpoints, 10)
    assert "global_step5" in published_tags(tmp_path / "async")
    checkpoints.finish()
    assert published_tags(tmp_path / "async") == ["global_step10", "global_step5"]
    assert (tmp_path / "async" / "latest").read_text() == "global_step10"


@pytest.mark.parametrize(
    ("error", "messages"),
    [
        (CheckpointError("weights.pt: No space left on device"), "rank 0: weights.pt: No space"),
        (MemoryError("no more"), "rank 0: MemoryError('no more')"),
    ],
)
def test_a_save_that_fails_ends_the_run_at_the_next_step(start, disk, tmp_path, error, messages):
    _, checkpoints = start("--async-save")
    disk.open.set()
    after(checkpoints, 5)
    checkpoints.finish()
    disk.fails = error
    after(checkpoints, 10)
    with problem(f"iteration 10 … {messages}", CheckpointError):
        until(lambda: False, checkpoints)
    assert published_tags(tmp_path / "async") == ["global_step5"]


def test_a_run_that_fails_finishes_what_it_writes(start, disk, tmp_path, messages):
    _, checkpoints = start("--async-save")
    checkpoints.rescue()  # nothing is under way
    after(checkpoints, 5)
    threading.Timer(0.2, disk.open.set).start()
    checkpoints.rescue()
    folder = tmp_path / "async" / "global_step5"
    files = read_manifest(folder).files
    assert [record.name for record in files] == ["offloaded/copied", "weights.pt"]
    assert damage(folder, files) == []
    assert (tmp_path / "async" / "latest").read_text() == "global_step5"
    assert [text for text in messages if "successfully saved" in text]
    checkpoints.rescue()  # once


def test_a_run_that_fails_because_it_cannot_write_leaves_the_older_ones(
    start, disk, tmp_path, messages
):
    _, checkpoints = start("--async-save")
    disk.open.set()
    after(checkpoints, 5)
    checkpoints.finish()
    disk.fails = OSError("no space")
    after(checkpoints, 10)
    checkpoints.rescue()
    assert published_tags(tmp_path / "async") == ["global_step5"]
    require_problem("iteration 10 … rank 0: OSError('no space')", messages[-1:])


def a_save_of_two(directory, *, is_there=True, later=0.2):
    """Return the pending saves of two ranks whose second file is written later, or never."""
    folder = clear_staging(directory, 5)
    saves, written = [], [Future(), Future()]
    for rank, file in enumerate(written):
        manifest = Manifest(
            state=TrainState(iteration=5),
            plan={},
            config={},
            versions={},
            partition_dims={},
            files=(),
        )
        saves.append(PendingSave(directory, manifest, [file]))
        if rank == 0 or is_there:
            threading.Timer(
                later * rank, lambda f=file, r=rank: f.set_result(write_one(folder, r))
            ).start()
    return saves, written


def write_one(folder, rank):
    (folder / f"of-{rank}").write_text("weights")
    return record_file(folder / f"of-{rank}")


def test_rank_0_publishes_when_all_ranks_have_written(tmp_path):
    saves, _ = a_save_of_two(tmp_path)
    with ThreadPoolExecutor(2) as ranks:
        done = [ranks.submit(finish_alone, s, rank=r, ranks=2) for r, s in enumerate(saves)]
        # Behind the first rank that leaves, a launcher gives the others half a minute.
        assert done[1].result() is False
        folder = tmp_path / "global_step5"
        assert folder.is_dir()
        assert done[0].result() is True
    assert [record.name for record in read_manifest(folder).files] == ["of-0", "of-1"]
    assert {file.name for file in folder.iterdir()} == {"of-0", "of-1", "manifest.json"}
    # The other rank finds that all is done.
    assert finish_alone(saves[1], rank=1, ranks=2) is False


@pytest.mark.parametrize(("flush_s", "is_awaited"), [(60.0, True), (0.0, False)])
def test_a_rank_whose_disk_is_flushing_is_waited_for(tmp_path, flush_s, is_awaited):
    knobs = {"silence_s": 0.3, "flush_s": flush_s, "beat_s": 0.02}
    saves, _ = a_save_of_two(tmp_path, later=1.5)
    with ThreadPoolExecutor(2) as ranks:
        done = [
            ranks.submit(finish_alone, s, rank=r, ranks=2, **knobs) for r, s in enumerate(saves)
        ]
        if is_awaited:
            assert done[0].result() is True
        else:
            with problem("ranks [1]", CheckpointError):
                done[0].result()
    assert published_tags(tmp_path) == ["global_step5"] * is_awaited


def test_rank_0_publishes_nothing_before_all_ranks_have_written(tmp_path):
    saves, written = a_save_of_two(tmp_path, is_there=False)
    with problem("ranks [1]", CheckpointError):
        finish_alone(saves[0], rank=0, ranks=2, silence_s=0.3)
    written[1].set_exception(OSError("no space"))
    for rank in (1, 0):
        with problem("rank 1: OSError('no space')", CheckpointError):
            finish_alone(saves[rank], rank=rank, ranks=2)
    assert published_tags(tmp_path) == []


def test_outdated_checkpoints_are_removed_in_the_background(start, tmp_path):
    _, checkpoints = start("--async-save", "--keep-last", "1")
    for iteration in (5, 10, 15):
        after(checkpoints, iteration)
        if iteration == 5:
            checkpoints.finish()
            (tmp_path / "async" / "global_step5" / "keep").touch()
    checkpoints.finish()
    # Of these, 15 may be a diverged one as long as no step has followed it.
    assert published_tags(tmp_path / "async") == [f"global_step{i}" for i in (15, 10, 5)]
    after(checkpoints, 16)
    checkpoints.finish()
    assert published_tags(tmp_path / "async") == ["global_step15", "global_step5"]


def test_nothing_is_removed_when_the_new_checkpoint_is_damaged(start, tmp_path):
    _, checkpoints = start("--async-save", "--keep-last", "1")
    after(checkpoints, 5)
    checkpoints.finish()
    after(checkpoints, 10)
    checkpoints.finish()
    (tmp_path / "async" / "global_step10" / "weights.pt").write_bytes(b"")
    after(checkpoints, 11)
    with problem("global_step10/weights.pt … 0 bytes", CheckpointError):
        checkpoints.finish()
    assert "global_step5" in published_tags(tmp_path / "async")


def test_a_kept_iteration_stays_kept_for_the_iteration_that_is_saved_again(start, tmp_path):
    for _ in range(2):
        start()[1].save(TrainState(iteration=5))
        (Path(tmp_path) / "async" / "global_step5" / "keep").touch()
    checkpoints = start("--keep-last", "1")[1]
    for iteration in (5, 6, 10, 11):
        after(checkpoints, iteration)
    assert published_tags(tmp_path / "async") == ["global_step10", "global_step5"]


@pytest.mark.parametrize(
    "settings", ['"writer": {"type": "fast"}', '"checkpoint_serialization": false']
)
def test_other_writers_are_refused(tmp_path, settings):
    (tmp_path / "ds.json").write_text(f'{{"checkpoint": {{{settings}}}}}')
    with problem("checkpoint. … --async-save"):
        tiny_plan("--deepspeed_config", str(tmp_path / "ds.json"))


def test_saving_in_the_background_needs_a_directory():
    with problem("--async-save … --save"):
        tiny_plan("--async-save")
