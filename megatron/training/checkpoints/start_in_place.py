"""A new run in the directory of its first weights: --finetune or --reset-progress, --load equal to --save.

Its first start moves the checkpoints to the folder `initial` of the directory and loads from there; the
next ones continue from what the run has saved, or begin from `initial` again if it has saved nothing.
"""

import logging
import os
from dataclasses import replace
from pathlib import Path

from megatron.checkpointing.manifest import (
    LATEST,
    LATEST_UNIVERSAL,
    STAGING,
    published_tags,
    tag_of,
)
from megatron.checkpointing.megatron_lm.detect import foreign_checkpoint_in
from megatron.checkpointing.publish import restore_replaced
from megatron.common.atomic_files import sync_folder
from megatron.common.errors import CheckpointError, WrongCheckpointError, reason
from megatron.config.config import Config
from megatron.config.plan.plan import Plan
from megatron.config.run.checkpoint import INITIAL, plan_checkpoint
from megatron.training.loop.collectives import from_rank_0

log = logging.getLogger(__name__)

_TAG = tag_of(0).rstrip("0")  # in names of all folders of checkpoints


def with_start_in_place(plan: Plan, config: Config) -> Plan:
    """Return `plan` with the directory that this start loads from, and what it takes from there.

    Raises:
        CheckpointError: the directory cannot be written to.
        WrongCheckpointError: the weights to start from are in `initial`, and no flag takes them.

    Communication: collective; rank 0 reads the disk and moves the checkpoints.
    """
    requested = plan.checkpoint
    if not requested.load or requested.load != requested.save:
        return plan
    directory, trains = Path(requested.save), not plan.evaluation.only
    if requested.loads_progress or not trains:
        from_rank_0(lambda: _require_saved(directory))
        return plan
    if from_rank_0(lambda: _begins(directory)):
        initial = replace(requested, load=str(directory / INITIAL), must_exist=True)
        return replace(plan, checkpoint=initial)
    flag = "--finetune" if config.checkpoint.finetune else "--reset-progress"
    log.warning(
        "%s was started before: the run continues from its newest checkpoint, and %s is ignored",
        *(directory, flag),
    )
    continued = replace(config.checkpoint, finetune=False, reset_progress=False, ckpt_step=None)
    return replace(plan, checkpoint=plan_checkpoint(continued, trains=trains))


def _begins(directory: Path) -> bool:
    """Whether the run in `directory` has saved nothing yet; `initial` holds its checkpoints."""
    initial, making = directory / INITIAL, directory / f"{STAGING}{INITIAL}"
    if published_tags(initial):
        if published_tags(directory):
            return False
        log.info("%s holds no checkpoint of this run yet: it starts from %s", directory, initial)
        return True
    restore_replaced(directory)
    if not (making.exists() or published_tags(directory)):
        foreign = foreign_checkpoint_in(directory)
        problem = f"is {foreign}" if foreign else "holds no checkpoint to start from"
        raise WrongCheckpointError(f"--load {directory} {problem}")
    try:
        making.mkdir(exist_ok=True)  # there already if a start was killed while it moved them
        for name in sorted(os.listdir(directory)):
            if _TAG in name or name in (LATEST, LATEST_UNIVERSAL):
                os.rename(directory / name, making / name)
        os.rename(making, initial)
        sync_folder(directory)
    except OSError as error:
        raise CheckpointError(f"--save {directory}: {reason(error, directory)}") from error
    log.info(
        "the checkpoints of %s are in %s now, and the run starts from one of them; later starts continue "
        "from what the run saves",
        *(directory, initial),
    )
    return True


def _require_saved(directory: Path) -> None:
    moved = directory / INITIAL, directory / f"{STAGING}{INITIAL}"
    if any(map(published_tags, moved)) and not published_tags(directory):
        raise WrongCheckpointError(
            f"--load {directory} holds only the checkpoints that a run was to start from, in "
            f"{directory / INITIAL}: write --finetune or --reset-progress again, or --load "
            f"{directory / INITIAL}"
        )
