"""What things in a checkpoint directory are called."""

import os
import re
from pathlib import Path

from megatron.common.errors import UnreadableCheckpointError

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
MANIFEST = "manifest.json"
KEEP = "keep"
STAGING = "staging-"
REPLACED = "replaced-"
PRUNED = "pruned-"
ASIDE = "aside-"
LOCK = "lock.json"

_TAG = re.compile(r"global_step(\d+)")


def tag_of(iteration: int) -> str:
    """Return the folder name of the checkpoint of `iteration`."""
    return f"global_step{iteration}"


def staging_tag_of(iteration: int) -> str:
    """Return the folder name under which the checkpoint of `iteration` is written."""
    return f"{STAGING}{tag_of(iteration)}"


def iteration_of(tag: str) -> int | None:
    """Return the iteration that a folder name stands for; None for other folders."""
    match = _TAG.fullmatch(tag)
    return int(match.group(1)) if match else None


def published_tags(directory: Path) -> list[str]:
    """Return the checkpoints of `directory` that have a manifest, the newest first.

    Raises:
        UnreadableCheckpointError: what there is cannot be looked at.
    """
    try:
        iterations = [i for name in os.listdir(directory) if (i := iteration_of(name)) is not None]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UnreadableCheckpointError(f"{directory} cannot be read: {error.strerror}") from error
    tags = (tag_of(i) for i in sorted(iterations, reverse=True))
    return [tag for tag in tags if has_manifest(directory / tag)]


def has_manifest(folder: Path) -> bool:
    """Return whether `folder` counts as a checkpoint.

    Raises:
        UnreadableCheckpointError: the disk or its permissions do not let this be known.
    """
    file = folder / MANIFEST
    try:
        file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UnreadableCheckpointError(f"{file} cannot be read: {error.strerror}") from error
    return True


def checkpoint_of(path: Path) -> Path:
    """Return the newest checkpoint of the directory `path`, or `path` if it is one itself."""
    if has_manifest(path):
        return path
    tags = published_tags(path)
    return path / tags[0] if tags else path
