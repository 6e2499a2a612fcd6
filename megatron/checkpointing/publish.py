"""Publish staged checkpoints by one rename; the newest one; retention; rollback to an older one."""

import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

from megatron.checkpointing.lock import require_not_taken
from megatron.checkpointing.manifest import (
    ASIDE,
    KEEP,
    LATEST,
    MANIFEST,
    PRUNED,
    REPLACED,
    STAGING,
    FileRecord,
    Manifest,
    has_manifest,
    iteration_of,
    published_tags,
    staging_tag_of,
    tag_of,
    write_manifest,
)
from megatron.common.atomic_files import open_regular, remove_any, replace_text, sync_folder
from megatron.common.errors import CheckpointError, reason
from megatron.config.run.checkpoint import CheckpointPlan

log = logging.getLogger(__name__)


def clear_staging(directory: Path, iteration: int) -> Path:
    """Create an empty staging folder for the checkpoint of `iteration`.

    Leftovers of a killed run are removed, after `restore_replaced`.

    Raises:
        CheckpointError: the directory cannot be written to, or another run writes there.
    """
    require_not_taken(directory)
    staging = directory / staging_tag_of(iteration)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        clear_leftovers(directory)
        staging.mkdir()
    except OSError as error:
        raise CheckpointError(f"--save {directory}: {reason(error, directory)}") from error
    return staging


def discard_staging(directory: Path, iteration: int) -> bool:
    """Remove the staging folder of a failed save; return whether it is gone."""
    try:
        require_not_taken(directory)
    except CheckpointError:
        return False  # the other run may write one of that name
    staging = directory / staging_tag_of(iteration)
    shutil.rmtree(staging, ignore_errors=True)
    return not staging.exists()


def publish_written(directory: Path, manifest: Manifest, records: Iterable[FileRecord]) -> None:
    """Write the manifest of a staged checkpoint whose files are all on disk, and publish it.

    Args:
        manifest: without files.
        records: the files of all ranks, in any order.

    Raises:
        CheckpointError: the directory cannot be written to.
    """
    iteration = manifest.state.iteration
    by_name = {record.name: record for record in records}
    files = tuple(by_name[name] for name in sorted(by_name))
    try:
        write_manifest(directory / staging_tag_of(iteration), replace(manifest, files=files))
    except OSError as error:
        raise CheckpointError(f"{MANIFEST}: {error.strerror or error}") from error
    publish(directory, iteration)


def publish(directory: Path, iteration: int) -> None:
    """Rename the staged checkpoint of `iteration` to its final name, then point `latest` at it.

    Raises:
        CheckpointError: the directory cannot be written to, or another run writes there.
    """
    require_not_taken(directory)
    target = directory / tag_of(iteration)
    replaced = directory / f"{REPLACED}{target.name}"
    try:
        if os.path.lexists(target):
            # The same iteration was saved before (a run repeated from an older checkpoint). It
            # is removed only after the new one has its name; see restore_replaced. A file `keep`
            # applies to the iteration, so to the new one too.
            if (target / KEEP).exists():
                (directory / staging_tag_of(iteration) / KEEP).touch()
            os.rename(target, replaced)
        os.rename(directory / staging_tag_of(iteration), target)
        sync_folder(directory)
        if os.path.lexists(replaced):
            remove_any(replaced)
        point_latest(directory, target.name)
    except OSError as error:
        raise CheckpointError(f"--save {directory}: {reason(error, directory)}") from error


def point_latest(directory: Path, name: str) -> None:
    """Write `name` to `latest` of `directory`, atomically."""
    replace_text(directory / LATEST, name, has_one_writer=True)


def tidy(directory: Path, iteration: int) -> None:
    """Remove leftovers of a killed run, before a run resumes there.

    Args:
        iteration: that the run resumes from; `latest` names it afterwards.

    Raises:
        CheckpointError: the directory cannot be written to.
    """
    try:
        clear_leftovers(directory)
        if other_latest(directory, tag_of(iteration)):
            point_latest(directory, tag_of(iteration))
    except OSError as error:
        raise CheckpointError(f"--save {directory}: {reason(error, directory)}") from error


def clear_leftovers(directory: Path) -> None:
    """Remove the staging and pruned folders of a killed run, after `restore_replaced`."""
    restore_replaced(directory)
    for replaced in directory.glob(f"{REPLACED}*"):
        remove_any(replaced)
    for leftover in directory.glob(f"{STAGING}*"):
        # Other names belong to conversion tools that may be running.
        if iteration_of(leftover.name.removeprefix(STAGING)) is not None:
            remove_any(leftover)
    clear_pruned(directory)


def other_latest(directory: Path, newest: str) -> str | None:
    """Describe the content of `latest` of `directory`; None if it is `newest`."""
    try:
        with open_regular(directory / LATEST) as stream:
            hint = stream.read().decode(errors="replace").strip()
    except OSError:
        return "nothing: it is missing"
    return None if hint == newest else repr(hint[:40])


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


def restore_replaced(directory: Path) -> None:
    """Restore the older checkpoint of a run that was killed between the two renames of `publish`.

    Nothing changes if the newer one has its name already.
    """
    for replaced in directory.glob(f"{REPLACED}*"):
        target = directory / replaced.name.removeprefix(REPLACED)
        try:
            # A file or a link of that name was never a checkpoint.
            if replaced.is_dir() and not replaced.is_symlink() and not target.exists():
                os.rename(replaced, target)
        except OSError:
            # Another process may have been faster.
            if not target.exists():
                raise


def removable(
    directory: Path, plan: CheckpointPlan, *, newest: int, in_use: int, proven: int
) -> list[str]:
    """List the outdated checkpoints of `directory` (checkpoint retention); see `tags_to_delete`.

    One with a file `keep` in its folder is kept.
    """
    tags = published_tags(directory)
    tags = tags_to_delete(tags, plan, newest=newest, in_use=in_use, proven=proven)
    return [tag for tag in tags if not (directory / tag / KEEP).exists()]


def tags_to_delete(
    tags: Sequence[str], plan: CheckpointPlan, *, newest: int, in_use: int, proven: int
) -> list[str]:
    """Select the outdated of `tags`, which are sorted from the newest (checkpoint retention).

    Kept are the newest --keep-last, the multiples of --keep-every, the one that the run resumed
    from, and the newest that a finite step has followed with all after it: weights that diverged
    in a finite step show it in the next one. Checkpoints of later iterations than the newest were
    rejected or unreadable when the run resumed; they are neither removed nor counted.

    Args:
        newest: the iteration that was saved last.
        in_use: the iteration that the run resumed from; -1 for none.
        proven: the newest saved iteration that a finite step has followed; -1 for none.
    """
    if not plan.keep_last:
        return []
    iterations = [i for tag in tags if (i := iteration_of(tag)) is not None and i <= newest]
    kept = {in_use, *iterations[: plan.keep_last]}
    if plan.keep_every:
        kept |= {i for i in iterations if i % plan.keep_every == 0}
    return [tag_of(i) for i in iterations if i not in kept and i < proven]


def prune(directory: Path, tags: Sequence[str]) -> None:
    """Remove the checkpoints `tags` of `directory`.

    A checkpoint is renamed before its first file is removed, so that half of one is never taken for
    a checkpoint. Errors are logged, not raised.
    """
    for tag in tags:
        try:
            os.rename(directory / tag, directory / f"{PRUNED}{tag}")
        except OSError as error:
            log.warning("the outdated checkpoint %s cannot be removed: %s", tag, error)
        else:
            log.info("  removed the outdated checkpoint %s", directory / tag)
    clear_pruned(directory)


def clear_pruned(directory: Path) -> None:
    """Finish removals, including a killed run's."""
    for folder in directory.glob(f"{PRUNED}*"):
        with suppress(OSError):
            remove_any(folder)


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
            "%s: the checkpoints after iteration %d are kept as %s; remove them when they are "
            "not needed",
            *(directory, iteration, ", ".join(names)),
        )
    return names


def _names(tag: str) -> Iterator[str]:
    yield f"{ASIDE}{tag}"
    yield from (f"{ASIDE}{number}-{tag}" for number in count(2))
