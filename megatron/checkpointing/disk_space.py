"""Whether a checkpoint fits on its disk, asked before it is written."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.checkpointing.manifest import read_manifest
from megatron.checkpointing.names import published_tags
from megatron.common.errors import CheckpointError
from megatron.config.plan import Plan
from megatron.planner.checkpoint import checkpoint_bytes


@dataclass(frozen=True)
class Size:
    """What a checkpoint takes of a disk."""

    num_bytes: int
    num_files: int


def expected_size(directory: Path, plan: Plan) -> Size:
    """Return the size of the next checkpoint of the run of `plan` in `directory`.

    That of the newest one there if it is of this network, layout and parts; otherwise what the
    weights and the optimizer of all ranks take at least.
    """
    for tag in published_tags(directory)[:1]:
        try:
            manifest = read_manifest(directory / tag)
        except CheckpointError:
            break
        if _kind(manifest.plan) == _kind(asdict(plan)):
            return Size(sum(file.size for file in manifest.files), len(manifest.files) + 2)
    ranks = plan.parallel.world_size
    # A file of random streams for each rank; one of weights for each part of a replica.
    files = ranks * plan.checkpoint.saves_streams + ranks // plan.parallel.data
    return Size(checkpoint_bytes(plan), files + 2)


def require_space(directory: Path, size: Size) -> None:
    """Refuse to write a checkpoint of `size` to `directory` where it does not fit.

    Raises:
        CheckpointError: there are too few free bytes, or too few free files.
    """
    disk = os.statvfs(directory)
    free = disk.f_bavail * disk.f_frsize
    mend = "make room, keep fewer checkpoints with --keep-last, or give another --save"
    if free < size.num_bytes:
        raise CheckpointError(
            f"--save {directory}: the next checkpoint needs {size.num_bytes:,} bytes and {free:,} "
            f"are free; nothing was written: {mend}"
        )
    # Some file systems do not count files: they say that they have none at all.
    if disk.f_files and disk.f_favail < size.num_files:
        raise CheckpointError(
            f"--save {directory}: the next checkpoint needs {size.num_files:,} files (inodes) and "
            f"{disk.f_favail:,} are free; nothing was written: {mend}"
        )


def is_full_disk(error: Exception) -> bool:
    """Whether `error` is what writing a tensor to a full or broken disk raises."""
    # torch's writer of archives tells of a failed write by its own words.
    words = ("PytorchStreamWriter failed", "inline_container", "unexpected pos")
    return isinstance(error, OSError) or any(word in str(error) for word in words)


_LAYOUT = ("tensor", "pipeline", "data", "zero_stage")
_PARTS = ("saves_optimizer", "saves_streams")


def _kind(plan: dict[str, Any]) -> tuple[object, ...]:
    """Return what the size of a checkpoint depends on, of a plan or of one that was saved."""
    fields = (
        *(("model", "num_layers"), ("model", "hidden_size"), ("optimizer", "name")),
        ("precision", "dtype"),
        *(("parallel", name) for name in _LAYOUT),
        *(("checkpoint", name) for name in _PARTS),
    )
    return tuple(plan.get(part, {}).get(name) for part, name in fields)
