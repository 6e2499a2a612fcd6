"""Whether a checkpoint fits on its disk."""

import pytest
from problems import problem
from tiny import tiny_plan

from megatron.checkpointing.disk_space import Size, expected_size, is_full_disk, require_space
from megatron.checkpointing.manifest import FileRecord, Manifest, write_manifest
from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import CheckpointError

SAVE = ("--save", "runs", "--save-interval", "5")


def test_too_few_bytes_are_refused_with_both_numbers(disk, tmp_path):
    disk()
    require_space(tmp_path, Size(4_096_000, 5))
    with problem("4,096,001 bytes … 4,096,000", CheckpointError):
        require_space(tmp_path, Size(4_096_001, 5))


def test_too_few_inodes_are_refused(disk, tmp_path):
    disk()
    with problem("6 files (inodes) … 5", CheckpointError):
        require_space(tmp_path, Size(1, 6))


def test_a_file_system_that_does_not_count_files_has_room_for_them(disk, tmp_path):
    disk(files=0, free_files=0)
    require_space(tmp_path, Size(1, 1_000_000))


@pytest.mark.parametrize(
    ("flags", "bytes_each"),
    [
        ((), 4 + 8),
        (("--bf16",), 2 + 4 + 8),
        (("--no-save-optim",), 4),
        (("--optimizer", "sgd"), 4 + 4),
        (("--optimizer", "sgd", "--sgd-momentum", "0"), 4),
        (("--zero-stage", "1"), 4 + 4 + 8),
    ],
)
def test_the_first_checkpoint_takes_weights_and_optimizer(tmp_path, flags, bytes_each):
    plan = tiny_plan(*SAVE, *flags)
    assert expected_size(tmp_path, plan).num_bytes == plan.model.num_parameters * bytes_each


def test_the_next_checkpoint_is_as_large_as_the_last_of_its_kind(tmp_path):
    plan = tiny_plan(*SAVE)
    folder = tmp_path / "global_step5"
    folder.mkdir()
    files = (FileRecord("a", 1000, "sha256:0"), FileRecord("b", 500, "sha256:0"))
    write_manifest(
        folder,
        Manifest(
            state=TrainState(),
            plan=plan.to_dict(),
            config={},
            versions={},
            partition_dims={},
            files=files,
        ),
    )
    assert expected_size(tmp_path, plan) == Size(1500, 4)
    other = tiny_plan(*SAVE, "--no-save-optim")
    assert expected_size(tmp_path, other).num_bytes == other.model.num_parameters * 4


def test_a_failed_write_is_distinguished_from_other_errors():
    assert is_full_disk(OSError(28, "No space left on device"))
    assert is_full_disk(RuntimeError("PytorchStreamWriter failed writing file data/0"))
    assert not is_full_disk(RuntimeError("Connection reset"))
