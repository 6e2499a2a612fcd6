"""When a checkpoint counts: after one rename, of a folder whose files are all on disk."""

import os
import shutil
from pathlib import Path

from megatron.checkpoint.manifest import sync_folder
from megatron.checkpoint.names import LATEST, staging_tag_of, tag_of


def clear_staging(directory: Path, iteration: int) -> Path:
    """Return an empty folder to write the checkpoint of `iteration` into.

    What a killed run left there is removed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in directory.glob(staging_tag_of(0).removesuffix("0") + "*"):
        shutil.rmtree(leftover)
    staging = directory / staging_tag_of(iteration)
    staging.mkdir()
    return staging


def publish(directory: Path, iteration: int) -> None:
    """Give the staged checkpoint of `iteration` its name, then point `latest` at it."""
    target = directory / tag_of(iteration)
    if target.exists():
        # The same iteration was saved before (a run repeated from an older checkpoint).
        shutil.rmtree(target)
    os.rename(directory / staging_tag_of(iteration), target)
    sync_folder(directory)
    hint = directory / f"{LATEST}.staging"
    hint.write_text(target.name, encoding="utf-8")
    os.replace(hint, directory / LATEST)
