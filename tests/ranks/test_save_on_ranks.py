"""A checkpoint written while training goes on is the one that training would have waited for."""

import tempfile
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engines import batches_of, engine_of
from problems import problem
from ranks import outcomes_on_ranks, require_passed
from steps import step
from tiny import tiny_config

from megatron.checkpointing import writer
from megatron.checkpointing.manifest import published_tags, read_manifest
from megatron.checkpointing.resharding.digest import digest_of, digests
from megatron.checkpointing.resharding.universal import read_checkpoint
from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import CheckpointError
from megatron.training.checkpoints.save import Checkpoints
from megatron.training.loop.collectives import from_rank_0

TENSOR = "--tensor-model-parallel-size 2"


@contextmanager
def shared_folder():
    folder = Path(from_rank_0(tempfile.mkdtemp))
    yield folder
    dist.barrier()


def checkpoints_in(folder, engine, plan, *, in_background):
    options = replace(
        plan.checkpoint, save=str(folder), interval=1_000_000, in_background=in_background
    )
    return Checkpoints(engine, replace(plan, checkpoint=options), tiny_config())


def content(file):
    return torch.load(file, weights_only=False)


def require_same(one, other, where):
    """Compare everything in two files, bit for bit."""
    assert type(one) is type(other), where
    if torch.is_tensor(one):
        assert (one.dtype, one.requires_grad) == (other.dtype, other.requires_grad), where
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            require_same(one[key], other[key], (*where, key))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for number, (mine, yours) in enumerate(zip(one, other, strict=True)):
            require_same(mine, yours, (*where, number))
    elif hasattr(one, "__dict__"):
        require_same(vars(one), vars(other), where)
    else:
        assert one == other, where


def digest_in(folder):
    return digest_of(digests(read_checkpoint(folder, read_manifest(folder)), 11))


def saved_twice(layout, rank):
    """Save at once and in the background, with steps before the latter is written."""
    engine, plan, groups = engine_of("--micro-batch-size", "1", *layout.split())
    batches = batches_of(plan, groups)
    engine.train_batch(batches)
    with shared_folder() as folder:
        waited_for = checkpoints_in(folder / "sync", engine, plan, in_background=False)
        waited_for.save(TrainState(iteration=2))
        behind = checkpoints_in(folder / "async", engine, plan, in_background=True)
        behind.save(TrainState(iteration=2))
        iteration = 3
        while behind.is_under_way:
            engine.train_batch(batches)
            behind.after_step(TrainState(iteration=iteration), step(1.0))
            iteration += 1
        one, other = (folder / name / "global_step2" for name in ("sync", "async"))
        files = read_manifest(one).files, read_manifest(other).files
        names = [[record.name for record in records] for records in files]
        assert names[0] == names[1]
        for name in names[0][rank::2]:
            require_same(content(one / name), content(other / name), (name,))
        digest = digest_in(one)
        assert digest_in(other) == digest
        # What is trained on meanwhile differs, so that the comparison says something.
        if layout == TENSOR:
            waited_for.save(TrainState(iteration=4))
            assert digest_in(folder / "sync" / "global_step4") != digest


def shards_are_written_behind(rank):
    saved_twice(TENSOR, rank)


def stages_are_written_behind(rank):
    saved_twice("--pipeline-model-parallel-size 2", rank)


def stages_in_16_bits_are_written_behind(rank):
    saved_twice("--bf16 --zero-stage 1 --pipeline-model-parallel-size 2", rank)


def replicas_at_zero_2_are_written_behind(rank):
    saved_twice("--bf16 --zero-stage 2", rank)


def replicas_at_zero_3_are_written_behind(rank):
    saved_twice("--zero-stage 3", rank)


def a_disk_that_is_full_for_one_rank_ends_all(rank):
    engine, plan, _ = engine_of("--micro-batch-size", "1", "--zero-stage", "1")
    write_state = writer.write_state

    def full(state, file):
        raise CheckpointError(f"{file.name}: No space left on device")

    with shared_folder() as folder:
        for in_background in (False, True):
            to = folder / str(in_background)
            checkpoints = checkpoints_in(to, engine, plan, in_background=in_background)
            checkpoints.save(TrainState(iteration=5))
            checkpoints.finish()
            writer.write_state = full if rank == 1 else write_state
            try:
                with problem("iteration 10 … rank 1: … No space", CheckpointError):
                    checkpoints.save(TrainState(iteration=10))
                    for iteration in range(11, 100_000):
                        checkpoints.after_step(TrainState(iteration=iteration), step(1.0))
            finally:
                writer.write_state = write_state
            assert published_tags(to) == ["global_step5"]


def nothing_counts_before_all_files_do(rank):
    engine, plan, _ = engine_of("--micro-batch-size", "1", "--zero-stage", "1")
    write_state = writer.write_state

    with shared_folder() as folder:

        def write(state, file):
            assert rank == 0 or is_released.wait(30)
            record = write_state(state, file)
            written.append(record.name)
            if len(written) == 3:  # the weights, the optimizer's and the RNG states
                is_written.set()
            return record

        is_released, is_written, written = threading.Event(), threading.Event(), []
        checkpoints = checkpoints_in(folder, engine, plan, in_background=True)
        writer.write_state = write
        try:
            checkpoints.save(TrainState(iteration=5))
            if rank == 0:
                assert is_written.wait(30)
                assert all((folder / "staging-global_step5" / name).exists() for name in written)
            for iteration in (6, 7, 8):
                checkpoints.after_step(TrainState(iteration=iteration), step(1.0))
            assert checkpoints.is_under_way
            assert not (folder / "staging-global_step5" / "manifest.json").exists()
            assert published_tags(folder) == []
            dist.barrier()
            is_released.set()
            checkpoints.finish()
        finally:
            writer.write_state = write_state
        assert published_tags(folder) == ["global_step5"]


CHECKS = [
    shards_are_written_behind,
    stages_are_written_behind,
    stages_in_16_bits_are_written_behind,
    replicas_at_zero_2_are_written_behind,
    replicas_at_zero_3_are_written_behind,
    a_disk_that_is_full_for_one_rank_ends_all,
    nothing_counts_before_all_files_do,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(2, CHECKS, tmp_path_factory.mktemp("save"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_ranks(check, outcomes):
    require_passed(check, outcomes)
