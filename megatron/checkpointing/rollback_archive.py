"""Rollback archive: checkpoints newer than the one a run rolled back to, renamed and kept."""

import logging
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from megatron.checkpointing.names import ASIDE, iteration_of, published_tags, tag_of
from megatron.checkpointing.publish import point_latest
from megatron.common.atomic_files import sync_folder
from megatron.common.errors import CheckpointError, reason

log = logging.getLogger(__name__)


def set_aside(directory: Path, iteration: int) -> list[str]:
    """Rename the checkpoints newer than `iteration` and point `latest` at `iteration`; return the names.

    The renamed folders are never loaded, replaced or removed.

    Raises:
        CheckpointError: the directory cannot be written to.
    """
    newer = [tag for tag in published_tags(directory) if (iteration_of(tag) or 0) > iteration]
    names = []
    try:
        # Newest first: if the process dies here, the run has rolled back less far.
        for tag in newer:
            names.append(next(name for name in _names(tag) if not (directory / name).exists()))
            os.rename(directory / tag, directory / names[-1])
        if newer:
            point_latest(directory, tag_of(iteration))
            sync_folder(directory)
    except OSError as error:
        raise CheckpointError(f"--save {directory}: {reason(error, directory)}") from error
    if names:
        log.warning(
            "%s: the checkpoints behind iteration %d are kept as %s; remove them when they are "
            "not needed",
            *(directory, iteration, ", ".join(names)),
        )
    return names


def _names(tag: str) -> Iterator[str]:
    yield f"{ASIDE}{tag}"
    yield from (f"{ASIDE}{number}-{tag}" for number in count(2))
