"""Going on from a checkpoint: which one, and whether it is of this run."""

import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron.checkpoint.compare import (
    has_same_ranks,
    layout_changes,
    other_wishes,
    require_reshapable,
    require_same_run,
    require_same_schedule,
)
from megatron.checkpoint.layouts import read_whole
from megatron.checkpoint.manifest import Manifest, damage, read_manifest
from megatron.checkpoint.names import published_tags
from megatron.checkpoint.publish import other_latest, restore_replaced
from megatron.checkpoint.universal import is_universal, read_universal, with_universal
from megatron.engine.engine import Engine
from megatron.errors import CheckpointError, NewerCheckpointError
from megatron.parallel.random import renewed_seed
from megatron.plan.checkpoint_plan import CheckpointPlan
from megatron.plan.plan import Plan
from megatron.plan.schedule_plan import SchedulePlan
from megatron.training.agree import from_rank_0, gathered, share_of
from megatron.training.state import TrainState

log = logging.getLogger(__name__)


def resume(engine: Engine, plan: Plan, state: TrainState) -> Plan:
    """Go on from the newest complete checkpoint of --load, if there is one; return how.

    That is `plan`, with the checkpoint's learning rate if the flags want that.

    A damaged checkpoint is passed over for the next older one, and said. Without any, the run
    starts from the beginning when --load is also --save, as in the first job of a chain.

    Raises:
        CheckpointError: there is none to go on from, or it is of another run.

    Communication: every rank must call this, in step; rank 0 looks, and all do what it found.
    """
    directory = Path(plan.checkpoint.load)
    tags = from_rank_0(lambda: _find(directory, universal=plan.checkpoint.universal))
    for tag in tags:
        folder = directory / tag
        try:
            manifest = _verified_manifest(folder)
        except NewerCheckpointError:
            # Going on from an older one would replace what the newer program has done.
            raise
        except CheckpointError as error:
            log.warning("%s is passed over: %s", folder, error)
            continue
        now = _as_json(asdict(plan))
        require_same_run(
            manifest.plan, now, str(folder), with_optimizer=plan.checkpoint.loads_optimizer
        )
        _require_parts(manifest, plan.checkpoint, str(folder))
        goes_on = plan.checkpoint.loads_progress and not plan.evaluation.only
        if goes_on and plan.schedule.on_resume == "equal":
            require_same_schedule(manifest.plan, now, str(folder))
        elif plan.schedule.on_resume == "checkpoint":
            plan = replace(plan, schedule=_saved_schedule(manifest, folder))
        if goes_on:
            for difference in other_wishes(manifest.plan, _as_json(asdict(plan))):
                log.warning("going on from %s with other settings: %s", folder, difference.strip())
        _load(engine, plan, manifest, folder)
        if plan.checkpoint.loads_progress:
            vars(state).update(manifest.state)
        log.info(
            "  successfully loaded checkpoint from %s at iteration %d",
            *(directory, manifest.state["iteration"]),
        )
        if not plan.checkpoint.loads_progress:
            log.info("training starts from iteration 0 with its weights")
        return plan
    if tags:
        raise CheckpointError(
            f"no checkpoint of --load {directory} is whole ({', '.join(tags)} are damaged); starting "
            "over would replace them: mend them, or move them away"
        )
    if plan.checkpoint.must_exist:
        raise CheckpointError(
            f"--load {directory} holds no complete checkpoint; give the directory that a run "
            "saved to with --save"
        )
    log.info("no checkpoint in %s yet: training starts from the beginning", directory)
    return plan


def _load(engine: Engine, plan: Plan, manifest: Manifest, folder: Path) -> None:
    """Fill `engine` from `folder`, whatever the layout of the run that saved it."""
    wished, now = plan.checkpoint, _as_json(asdict(plan))
    changes, universal = layout_changes(manifest.plan, now), is_universal(manifest)
    require_reshapable(manifest.plan, changes, str(folder), with_optimizer=wished.loads_optimizer)
    if not changes and not universal:
        engine.load(
            folder.parent,
            folder.name,
            optimizer=wished.loads_optimizer,
            streams=wished.loads_streams,
        )
        return
    log.info("reshaping %s to this layout:", folder)
    for change in changes:
        log.info(change)
    if (rows := manifest.plan["model"]["padded_vocab_size"]) != plan.model.padded_vocab_size:
        log.warning(
            "the table of tokens gets other padding, which takes part in the softmax: the loss "
            "will differ a little; --pad-vocab-size-to %d keeps it",
            rows,
        )
    # Every rank has verified its share of the files.
    if universal:
        whole = read_universal(folder, manifest)
    else:
        whole = read_whole(folder, manifest, optimizer=wished.loads_optimizer, verify=False)
    engine.load_whole(whole, optimizer=wished.loads_optimizer)
    if not wished.loads_streams:
        return
    if has_same_ranks(manifest.plan, now) and not universal:
        engine.load_streams(folder)
        return
    seed = renewed_seed(plan.training.seed, manifest.state["iteration"])
    engine.renew_streams(seed, sequence_parallel=plan.parallel.sequence_parallel)
    log.info(
        "random streams belong to ranks, and these are others: they begin anew from --seed and "
        "the iteration; what is dropped differs from what the former layout would have dropped"
    )


def _find(directory: Path, *, universal: bool) -> list[str]:
    if directory.is_dir():
        restore_replaced(directory)
    tags = published_tags(directory)
    if tags and (told := other_latest(directory, tags[0])):
        log.warning(
            "latest in %s says %s: the folders count, and the newest is %s; to go on from an older "
            "one, move the newer away",
            *(directory, told, tags[0]),
        )
    return with_universal(directory, tags) if universal else tags


def _verified_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint that is as it was written; every rank reads its share.

    Raises:
        CheckpointError: lists what is damaged.
    """
    manifest = from_rank_0(lambda: read_manifest(folder))
    if problems := list(gathered(damage(folder, share_of(list(manifest.files))))):
        raise CheckpointError("; ".join(problems))
    return manifest


def _require_parts(manifest: Manifest, wished: CheckpointPlan, folder: str) -> None:
    """Refuse a checkpoint that was saved without what this run wants of it."""
    held = manifest.plan["checkpoint"]
    for part, wants, flag in (
        ("saves_optimizer", wished.loads_optimizer, "--no-load-optim"),
        ("saves_streams", wished.loads_streams, "--no-load-rng"),
    ):
        # Checkpoints of versions before these flags hold everything.
        if wants and not held.get(part, True):
            raise CheckpointError(
                f"{folder} was saved with --no-{'save-optim' if 'optim' in flag else 'save-rng'}: "
                f"write {flag}, or --finetune for its weights alone"
            )


def _saved_schedule(manifest: Manifest, folder: Path) -> SchedulePlan:
    try:
        return SchedulePlan(**manifest.plan["schedule"] | {"on_resume": "checkpoint"})
    except TypeError as error:
        raise CheckpointError(
            f"{folder} holds no learning rate that this version understands ({error}); write "
            "--override-opt_param-scheduler"
        ) from error


def _as_json(tree: Any) -> Any:
    """Return `tree` as it comes back from JSON: tuples as lists."""
    if isinstance(tree, dict):
        return {name: _as_json(value) for name, value in tree.items()}
    return [_as_json(value) for value in tree] if isinstance(tree, list | tuple) else tree
