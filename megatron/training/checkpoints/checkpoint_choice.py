"""Choose the checkpoint to resume from, and check that it fits, from manifests alone."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.checkpointing.compare import other_changes, table
from megatron.checkpointing.manifest import (
    LOCK,
    FileRecord,
    Manifest,
    iteration_of,
    published_tags,
    read_manifest,
    tag_of,
)
from megatron.checkpointing.megatron_lm.detect import foreign_checkpoint_in
from megatron.checkpointing.publish import other_latest, restore_replaced, warn_of_incomplete
from megatron.checkpointing.resharding.universal import is_universal, with_universal
from megatron.common.errors import (
    CheckpointError,
    NewerCheckpointError,
    UnreadableCheckpointError,
    WrongCheckpointError,
    near,
)
from megatron.config.plan.plan import Plan
from megatron.data.datasets.run_datasets import CorpusUse
from megatron.data.datasets.sample_order_check import other_order
from megatron.training.checkpoints.checkpoint_fit import as_json, going_on, require_fit, resumes
from megatron.training.checkpoints.system_info import differences, system_info
from megatron.training.loop.collectives import from_rank_0, scatter

log = logging.getLogger(__name__)

_MOST_NAMED = 10  # damaged checkpoints by name: a directory may hold any number


@dataclass(frozen=True)
class Chosen:
    """A checkpoint to resume from. Its manifest fits this run; its files are not read yet.

    Args:
        manifest: on rank 0 complete; on other ranks without files and versions, which list all
            ranks' files and hosts.
        older: names of the fallbacks if its files are damaged, the newest first.
        passed_over: how many newer ones are damaged.
        is_universal: whether it has no layout.
        share: the files that this rank verifies.
    """

    folder: Path
    manifest: Manifest
    older: tuple[str, ...]
    passed_over: int = 0
    is_universal: bool = False
    share: tuple[FileRecord, ...] = ()


def choose_checkpoint(plan: Plan, *, flag: str = "--load") -> Chosen | None:
    """Return the newest checkpoint of --load, or the one of --ckpt-step; None if there is none yet.

    A checkpoint with a damaged manifest is skipped for the next older one, with a warning.

    Args:
        flag: that the directory comes from.

    Raises:
        WrongCheckpointError: there is none to resume from, or it is of another run.

    Communication: collective; rank 0 reads the disk and broadcasts the result.
    """
    return chosen_by_rank_0(lambda: _newest(plan, _find(plan), flag=flag))


def next_older(plan: Plan, damaged: Chosen) -> Chosen:
    """Return the checkpoint to take in place of a damaged one; see `choose_checkpoint`."""

    def find() -> Chosen | None:
        found = _newest(plan, damaged.older, damaged.passed_over + 1) if damaged.older else None
        if found is None:
            raise _no_complete_checkpoint(plan)
        return found

    chosen = chosen_by_rank_0(find)
    assert chosen
    return chosen


def chosen_by_rank_0(find: Callable[[], Chosen | None]) -> Chosen | None:
    """Return the checkpoint that rank 0 finds, on each rank with its share of the files.

    Communication: every rank must call this, in step: one broadcast that does not grow with the
        files, and one record of each file to one rank.
    """
    found: list[Chosen] = []

    def find_and_shorten() -> Chosen | None:
        chosen = find()
        if chosen is None:
            return None
        chosen = replace(chosen, is_universal=is_universal(chosen.manifest))
        found.append(chosen)
        return replace(chosen, manifest=replace(chosen.manifest, files=(), versions={}))

    chosen = from_rank_0(find_and_shorten)
    if chosen is None:
        return None
    share = scatter(found[0].manifest.files if found else None)
    return replace(found[0] if found else chosen, share=tuple(share))


def log_changes(plan: Plan, chosen: Chosen) -> None:
    """Warn of permitted differences from the run that saved `chosen`.

    Communication: every rank must call this, in step.
    """
    folder, now = chosen.folder, system_info()
    if different := differences(chosen.manifest.versions, now):
        log.warning(
            "%s was saved with other software or devices:\n%s",
            *(folder, table(different, what="what")),
        )
    if not resumes(plan):
        return
    resumed = as_json(going_on(plan, chosen.folder, chosen.manifest).to_dict())
    if source := chosen.manifest.converted_from:
        log.warning(
            "%s was converted from %s: the data and the learning-rate schedule of its run are not "
            "known, and this run uses those of its flags, after %d samples",
            *(folder, source, chosen.manifest.state.samples),
        )
    if found := [*other_changes(chosen.manifest.plan, resumed, only_network=bool(source))]:
        log.warning("resuming from %s with other settings:\n%s", folder, table(found))


def log_other_order(plan: Plan, chosen: Chosen, uses: Sequence[CorpusUse]) -> None:
    """Warn if the samples come in another order than in the run that saved `chosen`.

    Args:
        uses: what is read of each corpus for training.
    """
    if not resumes(plan) or chosen.manifest.converted_from:
        return
    then, seq_length = chosen.manifest, plan.model.seq_length
    reasons = [
        f"{flag} was {before} and is {now}"
        for flag, before, now in (
            ("--seed", then.training.seed, plan.training.seed),
            ("--seq-length", then.spec.seq_length, seq_length),
        )
        if before != now
    ]
    reasons += other_order(then.data, plan.data, uses, seq_length=seq_length)
    if reasons:
        log.warning(
            "resuming from %s, the training samples come in another order: some come again and "
            "others never (%s); the former flags keep the order, and --exit-interval ends a "
            "run before its --train-iters",
            *(chosen.folder, "; ".join(reasons)),
        )


def with_weights_of(plan: Plan, directory: str) -> Plan:
    """Return `plan` for loading the weights of another run alone (--pretrained-checkpoint)."""
    checkpoint = replace(
        plan.checkpoint,
        load=directory,
        step=0,
        must_exist=True,
        loads_optimizer=False,
        loads_streams=False,
        loads_progress=False,
    )
    return replace(plan, checkpoint=checkpoint)


def warn_of_ended_decay(plan: Plan) -> None:
    """Warn that a run continues beyond the decay of its schedule to 0, where steps change nothing."""
    schedule, samples = plan.schedule, plan.training.train_samples
    last = samples * plan.model.seq_length if schedule.unit == "tokens" else samples
    ends_at_0 = schedule.style != "constant" and not schedule.floor
    if schedule.on_resume == "checkpoint" and ends_at_0 and schedule.decay < last:
        log.warning(
            "the learning rate of the checkpoint decays to 0 after %d %s, and this run trains for %d: "
            "--override-opt_param-scheduler takes the schedule of the flags",
            *(schedule.decay, schedule.unit, last),
        )


def with_saved_softmax(plan: Plan, manifest: Manifest) -> Plan:
    """Return `plan` with the softmax of the run that saved `manifest`.

    That is whether padded vocabulary columns take part in it, where there are any.
    """
    model, saved = plan.model, manifest.spec.vocabulary.padded_vocab_in_softmax
    vocabulary = model.vocabulary.with_softmax(counts_padding=saved)
    return replace(plan, model=replace(model, vocabulary=vocabulary))


def warn_passed_over(folder: Path, why: str, before: int) -> None:
    """Warn that the damaged checkpoint `folder` is skipped, unless many were `before` it."""
    if before < _MOST_NAMED:
        log.warning("%s is skipped: %s", folder, why)
    elif before == _MOST_NAMED:
        log.warning("%s is skipped too; further ones are skipped without a warning", folder)


def newest_readable(directory: Path, tags: Sequence[str], passed_over: int = 0) -> Chosen | None:
    """Return the first of `tags`, newest first, whose manifest is undamaged; warn of damaged ones.

    Args:
        passed_over: how many newer ones are damaged.

    Raises:
        NewerCheckpointError: a newer version of this program wrote one.
        UnreadableCheckpointError: the disk or its permissions do not let one be read.
    """
    for index, tag in enumerate(tags):
        try:
            manifest = read_manifest(directory / tag)
        except NewerCheckpointError:
            # Going on from an older one would replace what the newer program has done.
            raise
        except UnreadableCheckpointError as error:
            # So would it replace one that may be undamaged.
            raise UnreadableCheckpointError(
                f"{error}; no older checkpoint takes its place: make it readable, or move it away"
            ) from error
        except CheckpointError as error:
            warn_passed_over(directory / tag, str(error), passed_over + index)
            continue
        return Chosen(directory / tag, manifest, tuple(tags[index + 1 :]), passed_over + index)
    return None


def _newest(
    plan: Plan, tags: Sequence[str], passed_over: int = 0, *, flag: str = "--load"
) -> Chosen | None:
    directory = Path(plan.checkpoint.load)
    if chosen := newest_readable(directory, tags, passed_over):
        require_fit(plan, chosen.folder, chosen.manifest)
        return chosen
    if tags:
        raise _no_complete_checkpoint(plan)
    # Without --exit-on-missing-checkpoint too: the run would start from random weights.
    if foreign := foreign_checkpoint_in(directory):
        raise WrongCheckpointError(f"{flag} {directory} is {foreign}")
    if plan.checkpoint.must_exist:
        if not directory.exists():
            raise WrongCheckpointError(
                f"{flag} {directory}: there is no such directory{near(directory)}"
            )
        raise WrongCheckpointError(
            f"{flag} {directory} holds no complete checkpoint; give the directory that a run "
            "saved to with --save"
        )
    log.info("no checkpoint in %s yet: training starts from the beginning", directory)
    return None


def _find(plan: Plan) -> list[str]:
    requested = plan.checkpoint
    directory = Path(requested.load)
    # Where another run writes, it may be between the two renames.
    if requested.load == requested.save or not (directory / LOCK).exists():
        try:
            restore_replaced(directory)
        except OSError as error:
            raise WrongCheckpointError(
                f"--load {directory}: a killed run renamed a checkpoint, and the "
                f"name cannot be restored ({error}): rename it from a host that can write to the disk"
            ) from error
    tags = published_tags(directory)
    if requested.step:
        if tag_of(requested.step) not in tags:
            raise WrongCheckpointError(
                f"--ckpt-step {requested.step}: --load {directory} holds no complete checkpoint of "
                f"that iteration, but {_join_tags(tags) or 'none at all'}"
            )
        return [tag_of(requested.step)]
    if before := plan.guards.replay_step:
        return [tag for tag in tags if (iteration_of(tag) or 0) < before]
    is_named = bool(tags) and warn_of_incomplete(directory, tags[0])
    if tags and not is_named and (latest := other_latest(directory, tags[0])):
        log.warning(
            "latest in %s names %s: the folders are authoritative, and the newest is %s; to resume "
            "from an older one, write --ckpt-step",
            *(directory, latest, tags[0]),
        )
    return with_universal(directory, tags) if requested.universal else tags


def _no_complete_checkpoint(plan: Plan) -> WrongCheckpointError:
    tags = _find(plan)
    are = "is" if len(tags) == 1 else "are"
    return WrongCheckpointError(
        f"no checkpoint in --load {plan.checkpoint.load} is intact ({_join_tags(tags)} {are} damaged); "
        "a new run would replace them: repair them, or move them away"
    )


def _join_tags(tags: Sequence[str]) -> str:
    more = len(tags) - _MOST_NAMED
    return ", ".join(tags[:_MOST_NAMED]) + (f" and {more} others" if more > 0 else "")
