"""Which checkpoints of a directory are kept, and how the others go."""

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megatron.checkpointing.names import KEEP, PRUNED, iteration_of, published_tags, tag_of
from megatron.common.atomic_files import remove_any
from megatron.config.run.checkpoint import CheckpointPlan

log = logging.getLogger(__name__)


def removable(
    directory: Path, plan: CheckpointPlan, *, newest: int, in_use: int, proven: int
) -> list[str]:
    """Return the checkpoints of `directory` that are to go: see `superfluous`.

    One with a file `keep` in its folder stays, whatever the plan says.
    """
    tags = published_tags(directory)
    tags = superfluous(tags, plan, newest=newest, in_use=in_use, proven=proven)
    return [tag for tag in tags if not (directory / tag / KEEP).exists()]


def superfluous(
    tags: Sequence[str], plan: CheckpointPlan, *, newest: int, in_use: int, proven: int
) -> list[str]:
    """Return those of `tags`, the newest first, that need not be kept (checkpoint retention).

    Kept are the newest --keep-last, the multiples of --keep-every, the one that the run went on
    from, and the newest that a finite step has followed with all behind it: weights that diverged
    in a finite step show it in the next one. Of later iterations than the newest are only
    checkpoints that a run did not want or could not read; they are left alone, and count for
    nothing.

    Args:
        newest: the iteration that was saved last.
        in_use: the iteration that the run went on from; -1 for none.
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

    A checkpoint loses its name before its first file goes, so that half of one is never taken for
    one. A disk that refuses is told by a warning: the run needs nothing of what goes.
    """
    for tag in tags:
        try:
            os.rename(directory / tag, directory / f"{PRUNED}{tag}")
        except OSError as error:
            log.warning("%s is not needed any more and cannot be removed: %s", tag, error)
        else:
            log.info("  removed %s, which is not to be kept", directory / tag)
    clear_pruned(directory)


def clear_pruned(directory: Path) -> None:
    """Remove what has lost its name, also what a killed run left of it."""
    for folder in directory.glob(f"{PRUNED}*"):
        with suppress(OSError):
            remove_any(folder)
