"""Checkpoints of a run: written by all ranks, published once."""

import logging
import platform
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.checkpoint.compare import require_same_run
from megatron.checkpoint.manifest import (
    FileRecord,
    Manifest,
    damage,
    read_manifest,
    record_file,
    write_manifest,
)
from megatron.checkpoint.names import published_tags, staging_tag_of
from megatron.checkpoint.publish import clear_staging, publish
from megatron.config.config import Config
from megatron.engine.engine import Engine
from megatron.errors import CheckpointError, NewerCheckpointError
from megatron.parallel.sharding import shard_of
from megatron.plan.plan import Plan
from megatron.training.loop import StepResult
from megatron.training.state import TrainState
from megatron.version import VERSION

log = logging.getLogger(__name__)


class Checkpoints:
    """Saves every --save-interval iterations. For all ranks."""

    def __init__(self, engine: Engine, plan: Plan, config: Config):
        self._engine = engine
        self._plan = plan
        self._config = config
        self._directory = Path(plan.checkpoint.save)
        self._saved = -1  # iteration of the last checkpoint of this process

    def after_step(self, state: TrainState, step: StepResult) -> None:
        """Save when it is due."""
        if state.iteration % self._plan.checkpoint.interval == 0:
            self.save(state)

    def save(self, state: TrainState) -> None:
        """Save `state` and everything behind it, unless this very iteration is saved.

        Communication: every rank must call this, in step.
        """
        if self._saved == state.iteration:
            return
        log.info("saving checkpoint at iteration %7d to %s", state.iteration, self._directory)
        if dist.get_rank() == 0:
            clear_staging(self._directory, state.iteration)
        dist.barrier()
        tag = staging_tag_of(state.iteration)
        self._engine.save(self._directory, tag, {"iteration": state.iteration})
        dist.barrier()
        files = self._record_files(self._directory / tag)
        dims = self._partition_dims()
        if dist.get_rank() == 0:
            write_manifest(self._directory / tag, self._manifest(state, files, dims))
            publish(self._directory, state.iteration)
        dist.barrier()
        self._saved = state.iteration
        log.info(
            "  successfully saved checkpoint at iteration %7d to %s",
            state.iteration,
            self._directory,
        )

    def _record_files(self, folder: Path) -> tuple[FileRecord, ...]:
        """Hash the files of `folder`, every rank its share of them."""
        files = sorted(folder.iterdir())[dist.get_rank() :: dist.get_world_size()]
        return tuple(sorted(_gathered([record_file(file) for file in files]), key=_name))

    def _partition_dims(self) -> dict[str, int]:
        parameters = self._engine.module.named_parameters()
        own = [(name, shard.dim) for name, p in parameters if (shard := shard_of(p))]
        return dict(sorted(_gathered(own)))

    def _manifest(
        self, state: TrainState, files: tuple[FileRecord, ...], dims: dict[str, int]
    ) -> Manifest:
        return Manifest(
            state=asdict(state),
            plan=asdict(self._plan),
            config=asdict(self._config),
            versions={
                "megatron": VERSION,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            partition_dims=dims,
            files=files,
        )


def resume(engine: Engine, plan: Plan, state: TrainState) -> None:
    """Go on from the newest complete checkpoint of --load, if there is one.

    A damaged checkpoint is passed over for the next older one, and said. Without any, the run
    starts from the beginning when --load is also --save, as in the first job of a chain.

    Raises:
        CheckpointError: there is none to go on from, or it is of another run.

    Communication: every rank must call this, in step.
    """
    directory = Path(plan.checkpoint.load)
    tags = published_tags(directory)
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
        require_same_run(manifest.plan, _as_json(asdict(plan)), str(folder))
        engine.load(directory, tag)
        vars(state).update(manifest.state)
        log.info(
            "  successfully loaded checkpoint from %s at iteration %d", directory, state.iteration
        )
        return
    if tags:
        raise CheckpointError(
            f"no checkpoint of --load {directory} is whole ({', '.join(tags)} are damaged); starting "
            "over would replace them: mend them, or move them away"
        )
    if plan.checkpoint.load != plan.checkpoint.save:
        raise CheckpointError(
            f"--load {directory} holds no complete checkpoint; give the directory that a run "
            "saved to with --save"
        )
    log.info("no checkpoint in %s yet: training starts from the beginning", directory)


def _verified_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint that is as it was written; every rank reads its share.

    Raises:
        CheckpointError: lists what is damaged.
    """
    manifest = read_manifest(folder)
    share = manifest.files[dist.get_rank() :: dist.get_world_size()]
    if problems := list(_gathered(damage(folder, share))):
        raise CheckpointError("; ".join(problems))
    return manifest


def warn_of_others(plan: Plan) -> None:
    """Say when checkpoints of another run are about to be mixed with this one's."""
    tags = published_tags(Path(plan.checkpoint.save)) if plan.checkpoint.save else []
    if tags and plan.checkpoint.load != plan.checkpoint.save:
        log.warning(
            "--save %s holds checkpoints already (the newest is %s) and this run does not go on "
            "from them; checkpoints of the same iteration will be replaced",
            plan.checkpoint.save,
            tags[0],
        )


def _gathered(own: list[Any]) -> Iterator[Any]:
    """Yield every rank's items."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    for items in everyones:
        yield from items


def _name(record: FileRecord) -> str:
    return record.name


def _as_json(tree: Any) -> Any:
    """Return `tree` as it comes back from JSON: tuples as lists."""
    if isinstance(tree, dict):
        return {name: _as_json(value) for name, value in tree.items()}
    return [_as_json(value) for value in tree] if isinstance(tree, list | tuple) else tree
