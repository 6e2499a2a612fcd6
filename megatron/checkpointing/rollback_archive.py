"""Checkpoints of steps that a run takes again: kept, but not gone on from."""

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
    """Give the checkpoints behind `iteration` other names; return those.

    They count no more and nobody replaces or removes them; `latest` says `iteration`.

    Raises:
        CheckpointError: the directory cannot be written to.
    """
    newer = [tag for tag in published_tags(directory) if (iteration_of(tag) or 0) > iteration]
    names = []
    try:
        # The newest first: what is left when a process dies here is a run that went less far back.
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
