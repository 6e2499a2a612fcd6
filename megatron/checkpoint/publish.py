"""When a checkpoint counts: after one rename, of a folder whose files are all on disk."""

import os
import shutil
from pathlib import Path

from megatron.checkpoint.manifest import sync_folder
from megatron.checkpoint.names import LATEST, REPLACED, STAGING, staging_tag_of, tag_of


def clear_staging(directory: Path, iteration: int) -> Path:
    """Return an empty folder to write the checkpoint of `iteration` into.

    What a killed run left there is removed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in directory.glob(f"{STAGING}*"):
        shutil.rmtree(leftover)
    staging = directory / staging_tag_of(iteration)
    staging.mkdir()
    return staging


def publish(directory: Path, iteration: int) -> None:
    """Give the staged checkpoint of `iteration` its name, then point `latest` at it."""
    target, replaced = directory / tag_of(iteration), directory / f"{STAGING}{REPLACED}"
    if target.exists():
        # The same iteration was saved before (a run repeated from an older checkpoint). It goes
        # only when the new one stands.
        os.rename(target, replaced)
    os.rename(directory / staging_tag_of(iteration), target)
    sync_folder(directory)
    if replaced.exists():
        shutil.rmtree(replaced)
    hint = directory / f"{LATEST}.staging"
    hint.write_text(target.name, encoding="utf-8")
    os.replace(hint, directory / LATEST)
