"""What things in a checkpoint directory are called."""

import re
from pathlib import Path

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
    """Return the checkpoints of `directory` that have a manifest, the newest first."""
    if not directory.is_dir():
        return []
    iterations = (iteration_of(file.parent.name) for file in directory.glob(f"*/{MANIFEST}"))
    return [tag_of(i) for i in sorted((i for i in iterations if i is not None), reverse=True)]


def checkpoint_of(path: Path) -> Path:
    """Return the newest checkpoint of the directory `path`, or `path` if it is one itself."""
    if (path / MANIFEST).is_file():
        return path
    tags = published_tags(path)
    return path / tags[0] if tags else path
