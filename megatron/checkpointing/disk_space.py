"""Check free disk space (bytes and inodes) before a checkpoint is written."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpointing.manifest import Manifest, published_tags, read_manifest
from megatron.checkpointing.publish import clear_staging
from megatron.common.errors import CheckpointError
from megatron.config.network.model_spec import ModelSpec
from megatron.config.plan.plan import Plan
from megatron.planner.memory import checkpoint_bytes


@dataclass(frozen=True)
class Size:
    """Disk space of a checkpoint."""

    num_bytes: int
    num_files: int


def expected_size(directory: Path, plan: Plan) -> Size:
    """Estimate the size of the next checkpoint of `plan` in `directory`.

    The size of the newest checkpoint there if it has the same network, layout and parts; otherwise
    a lower bound from the weights and optimizer states of all ranks.
    """
    for tag in published_tags(directory)[:1]:
        try:
            manifest = read_manifest(directory / tag)
            is_same = _kind(manifest.spec, manifest) == _kind(plan.model, plan)
        except CheckpointError:
            break
        if is_same:
            return Size(sum(file.size for file in manifest.files), len(manifest.files) + 2)
    ranks = plan.parallel.world_size
    # One file of RNG states for each rank, one of weights for each rank of a replica.
    files = ranks * plan.checkpoint.saves_streams + ranks // plan.parallel.data
    return Size(checkpoint_bytes(plan), files + 2)


def require_space(directory: Path, size: Size) -> None:
    """Refuse to write a checkpoint of `size` to `directory` where it does not fit.

    Raises:
        CheckpointError: there are too few free bytes, or too few free files.
    """
    disk = os.statvfs(directory)
    free = disk.f_bavail * disk.f_frsize
    remedy = "make room, keep fewer checkpoints with --keep-last, or give another --save"
    if free < size.num_bytes:
        raise CheckpointError(
            f"--save {directory}: the next checkpoint needs {size.num_bytes:,} bytes and {free:,} "
            f"are free; nothing was written: {remedy}"
        )
    # Some file systems do not count inodes and report 0.
    if disk.f_files and disk.f_favail < size.num_files:
        raise CheckpointError(
            f"--save {directory}: the next checkpoint needs {size.num_files:,} files (inodes) and "
            f"{disk.f_favail:,} are free; nothing was written: {remedy}"
        )


def make_room(directory: Path, iteration: int, plan: Plan) -> None:
    """Create an empty staging folder for a checkpoint of `plan`, and check that it fits on the disk.

    Raises:
        CheckpointError: it does not, or the directory cannot be written to.
    """
    staging = clear_staging(directory, iteration)
    try:
        require_space(directory, expected_size(directory, plan))
    except CheckpointError:
        with suppress(OSError):
            staging.rmdir()
        raise
    except OSError as error:
        raise CheckpointError(f"--save {directory}: {error}") from error


def is_full_disk(error: Exception) -> bool:
    """Whether `error` is raised by writing a tensor to a full or broken disk."""
    # torch's archive writer reports a failed write with these messages.
    words = ("PytorchStreamWriter failed", "inline_container", "unexpected pos")
    return isinstance(error, OSError) or any(word in str(error) for word in words)


def _kind(spec: ModelSpec, run: Plan | Manifest) -> tuple[object, ...]:
    """Return the settings that determine the size of a run's checkpoints."""
    parallel, checkpoint = run.parallel, run.checkpoint
    return (
        *(spec.num_layers, spec.hidden_size, run.optimizer.name, run.precision.dtype),
        *(parallel.tensor, parallel.pipeline, parallel.data, parallel.zero_stage),
        *(checkpoint.saves_optimizer, checkpoint.saves_streams),
    )
