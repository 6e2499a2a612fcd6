"""Newest complete checkpoint of a directory, with a warning if a newer one has no manifest."""

import logging
from pathlib import Path

from megatron.checkpointing.manifest import (
    MANIFEST,
    has_manifest,
    iteration_of,
    published_tags,
    tag_of,
)

log = logging.getLogger(__name__)


def checkpoint_of(path: Path) -> Path:
    """Return the newest checkpoint of the directory `path`, or `path` if it is one itself.

    A newer one without a manifest is passed over with a warning.
    """
    if has_manifest(path):
        return path
    tags = published_tags(path)
    if not tags:
        return path
    warn_of_incomplete(path, tags[0])
    return path / tags[0]


def warn_of_incomplete(directory: Path, newest: str) -> bool:
    """Warn if a folder without a manifest has the name of a newer checkpoint than `newest`.

    Returns:
        Whether there is one.
    """
    iterations = (iteration_of(each.name) or 0 for each in directory.iterdir() if each.is_dir())
    last = tag_of(max(iterations, default=0))
    if last == newest or has_manifest(directory / last):
        return False
    log.warning(
        "%s has no %s and is passed over: it was not saved completely, or is damaged; the newest "
        "complete one is %s",
        *(directory / last, MANIFEST, newest),
    )
    return True
