"""Resume: load the chosen checkpoint, with resharding if its layout differs."""

import logging
from collections.abc import Sequence
from pathlib import Path

from megatron.checkpointing.compare import (
    adds_adapters,
    extends,
    has_other_task,
    has_same_ranks,
    layout_changes,
    replaces_head,
    require_reshapable,
    table,
    task_in,
)
from megatron.checkpointing.manifest import damage
from megatron.checkpointing.remote import set_aside
from megatron.checkpointing.resharding.layouts import sharded_index
from megatron.checkpointing.resharding.sharded_index import ShardedIndex
from megatron.checkpointing.resharding.universal import UniversalIndex, universal_index
from megatron.checkpointing.resharding.unpickle import read_state
from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import CheckpointError, WrongCheckpointError
from megatron.config.network.model_spec import ModelSpec, flat
from megatron.config.plan.plan import Plan
from megatron.data.datasets.run_datasets import CorpusUse
from megatron.engine.engine import Engine
from megatron.tensor_parallel.rng import renewed_seed
from megatron.training.checkpoints.checkpoint_choice import (
    Chosen,
    log_changes,
    log_other_order,
    next_older,
    warn_of_ended_decay,
    warn_passed_over,
)
from megatron.training.checkpoints.checkpoint_fit import as_json, going_on
from megatron.training.loop.collectives import from_rank_0, gather_findings

log = logging.getLogger(__name__)


def resume(
    engine: Engine,
    plan: Plan,
    state: TrainState,
    chosen: Chosen,
    *,
    uses: Sequence[CorpusUse] | None = None,
) -> Plan:
    """Fill `engine` and `state` from `chosen`, or from the next older one that is not damaged.

    Return how the run goes on; see `going_on`.

    Args:
        uses: what is read of each corpus for training; None where nothing is read.

    Raises:
        CheckpointError: none is undamaged, or it does not fit.

    Communication: every rank must call this, in step.
    """
    while problems := damage_of(chosen):
        warn_passed_over(chosen.folder, "; ".join(problems), chosen.passed_over)
        chosen = next_older(plan, chosen)
    log_changes(plan, chosen)
    if uses is not None:
        log_other_order(plan, chosen, uses)
    plan = going_on(plan, chosen.folder, chosen.manifest)
    warn_of_ended_decay(plan)
    load(engine, plan, chosen)
    if plan.checkpoint.loads_progress:
        state.load(chosen.manifest.state)
    iteration = chosen.manifest.state.iteration
    log.info(
        "  successfully loaded checkpoint from %s at iteration %d", plan.checkpoint.load, iteration
    )
    _log_replicas(chosen, plan)
    if not plan.checkpoint.loads_progress:
        log.info("training starts from iteration 0 with its weights")
    takes_again = plan.checkpoint.step and not plan.evaluation.only
    if takes_again and plan.checkpoint.load == plan.checkpoint.save:
        from_rank_0(lambda: set_aside(Path(plan.checkpoint.save), iteration))
    return plan


def _log_replicas(chosen: Chosen, plan: Plan) -> None:
    """Log a change of the number of replicas, and what it does to a step."""
    now, then = plan.batch, chosen.manifest.batch
    same = then.data_parallel_size == now.data_parallel_size
    if same or chosen.manifest.converted_from:
        return
    before, after = (batch.num_micro_batches(batch.global_batch_size) for batch in (then, now))
    size = f"the same {now.global_batch_size} samples in the same order"
    if then.global_batch_size != now.global_batch_size:
        size = f"{now.global_batch_size} samples instead of {then.global_batch_size}"
    log.info(
        "resumed on %d replicas instead of %d: gradient accumulation %d instead of %d; a step has %s",
        *(now.data_parallel_size, then.data_parallel_size, after, before, size),
    )


def damage_of(chosen: Chosen) -> list[str]:
    """Return the damage of the files; every rank reads its share.

    Communication: every rank must call this, in step.
    """
    return gather_findings(damage(chosen.folder, chosen.share))


def load(engine: Engine, plan: Plan, chosen: Chosen) -> None:
    """Load undamaged files into `engine`, whatever the layout of the run that saved them.

    Raises:
        CheckpointError: they do not fit.

    Communication: every rank must call this, in step.
    """
    folder, manifest = chosen.folder, chosen.manifest
    requested, now = plan.checkpoint, as_json(plan.to_dict())
    changes, universal = layout_changes(manifest.plan, now), chosen.is_universal
    require_reshapable(
        manifest.plan, changes, str(folder), with_optimizer=requested.loads_optimizer
    )
    adds = adds_adapters(manifest.plan, now), extends(manifest.plan, now)
    new_head = replaces_head(manifest.plan, now)
    other = task_in(manifest.plan) if has_other_task(manifest.plan, now) else ""
    if new_head and plan.evaluation.only:
        raise WrongCheckpointError(
            _other_head(folder, manifest.spec, plan.model, task_in(now), other)
        )
    # DeepSpeed would load the experts of the first replica on all.
    by_name = universal or any(adds) or new_head or plan.parallel.divides_experts
    if not (changes or by_name):
        from_rank_0(lambda: _require_no_strangers(chosen))
        engine.load(
            folder.parent,
            folder.name,
            read=read_state,
            optimizer=requested.loads_optimizer,
            streams=requested.loads_streams,
        )
        return
    if changes or universal:
        # Other values, such as the size of buckets, follow from these.
        flags = [each for each in changes if each.name.startswith("--")]
        details = f":\n{table(flags or changes)}" if changes else ""
        megabytes = requested.reshape_buffer_bytes >> 20
        log.info("reshaping %s to this layout, %d MB at a time%s", folder, megabytes, details)
    _log_initial_weights(folder, *adds, new_head=new_head, other_task=other)
    _load_resharded(engine, plan, chosen, new_head=new_head)
    if not requested.loads_streams:
        return
    if has_same_ranks(manifest.plan, now) and not universal:
        engine.load_streams(folder)
        return
    seed = renewed_seed(plan.training.seed, manifest.state.iteration)
    engine.renew_streams(seed, sequence_parallel=plan.parallel.sequence_parallel)
    log.info(
        "RNG states belong to ranks, and the ranks differ: they are seeded again from --seed and "
        "the iteration; dropout masks differ from those of the former layout"
    )


def _log_initial_weights(
    folder: Path, adapters: bool, neighbors: bool, *, new_head: bool, other_task: str
) -> None:
    """Log which parts of the network the checkpoint in `folder` does not hold."""
    if adapters:
        log.info("%s has no adapters: they start with no effect on its weights", folder)
    if neighbors:
        log.info(
            "%s holds a GPT: cross-attention to neighbors and their encoder start with initial weights",
            folder,
        )
    if other_task:
        log.warning(
            "%s has the head of --task %s: that of this task starts with initial weights",
            *(folder, other_task),
        )
    elif new_head:
        log.info("%s has no head of this task, which starts with initial weights", folder)


def _other_head(folder: Path, saved: ModelSpec, spec: ModelSpec, task: str, other: str) -> str:
    """Return the message about a checkpoint without the head of a task that is evaluated.

    Args:
        other: the task whose head it has, if it is another.
    """
    then, now = flat(saved)["labels"], flat(spec)["labels"]
    if not other and now and then:
        return (
            f"{folder} has a head for the {len(then)} labels {' '.join(then)}, and this command line "
            f"has {len(now)}: {' '.join(now)}; leave out --labels and --num-labels"
        )
    found = f"the head of --task {other} and " if other else ""
    return (
        f"{folder} has {found}no head of --task {task}, whose predictions would be random: give --load "
        "the directory of a network that was finetuned on it"
    )


def _load_resharded(engine: Engine, plan: Plan, chosen: Chosen, *, new_head: bool) -> None:
    """Load the full weights and optimizer state of `chosen`, this rank's shards of them."""
    folder, manifest, requested = chosen.folder, chosen.manifest, plan.checkpoint
    rows, vocabulary = manifest.spec.vocabulary.padded_vocab_size, plan.model.vocabulary
    if vocabulary.padded_vocab_in_softmax and rows != vocabulary.padded_vocab_size:
        log.warning(
            "the token table gets other padding, which takes part in the softmax "
            "(--padded-vocab-in-softmax): the loss will differ a little; --pad-vocab-size-to %d "
            "keeps it",
            rows,
        )
    # Every rank has verified its share of the files. Rank 0 alone has their list.
    optimizer = requested.loads_optimizer
    index: ShardedIndex | UniversalIndex = from_rank_0(
        lambda: (
            universal_index(folder, manifest)
            if chosen.is_universal
            else sharded_index(folder, manifest, optimizer=optimizer)
        )
    )
    engine.load_full(
        index.checkpoint(folder),
        optimizer=optimizer,
        buffer_bytes=requested.reshape_buffer_bytes,
        copies_padding=vocabulary.padded_vocab_in_softmax,
        new_head=new_head,
    )


def _require_no_strangers(chosen: Chosen) -> None:
    """Refuse state files that the run did not write: DeepSpeed loads all that match by name."""
    known = {record.name for record in chosen.manifest.files}
    names = sorted(file.name for file in chosen.folder.glob("*.pt") if file.name not in known)
    if names:
        raise CheckpointError(
            f"{chosen.folder} holds {', '.join(names)}, which its manifest does not name: move "
            "what is not of this checkpoint elsewhere"
        )
