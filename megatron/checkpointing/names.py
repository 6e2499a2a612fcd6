"""Names of files and folders in a checkpoint directory (`latest`, `global_stepN`, `manifest.json`)."""

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
    """Return the iteration in a checkpoint's folder name; None for other folders."""
    match = _TAG.fullmatch(tag)
    return int(match.group(1)) if match else None


def published_tags(directory: Path) -> list[str]:
    """List the checkpoints of `directory` that have a manifest, newest first.

    Raises:
        UnreadableCheckpointError: the directory cannot be read.
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
    """Whether `folder` is a complete checkpoint.

    Raises:
        UnreadableCheckpointError: the disk or its permissions do not allow reading it.
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
