"""Checkpoints of a run: written by all ranks, published once."""

import logging
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.checkpoint.lock import locked
from megatron.checkpoint.manifest import (
    FileRecord,
    Manifest,
    damage,
    record_file,
    write_manifest,
)
from megatron.checkpoint.names import published_tags, staging_tag_of, tag_of
from megatron.checkpoint.publish import clear_staging, publish
from megatron.checkpoint.retention import prune, superfluous
from megatron.checkpoint.space import expected_size, is_full_disk, require_space
from megatron.config.config import Config
from megatron.engine.engine import Engine
from megatron.errors import CheckpointError
from megatron.parallel.experts import whole_name
from megatron.parallel.sharding import shard_of
from megatron.plan.plan import Plan
from megatron.training.agree import from_rank_0, gathered, share_of
from megatron.training.loop import Hook, StepResult
from megatron.training.state import TrainState
from megatron.version import VERSION

log = logging.getLogger(__name__)


class Checkpoints(Hook):
    """Saves every --save-interval iterations. For all ranks.

    Args:
        saved: the iteration whose checkpoint is in --save already, if there is one.
    """

    def __init__(self, engine: Engine, plan: Plan, config: Config, *, saved: int = -1):
        self._engine = engine
        self._plan = plan
        self._config = config
        self._directory = Path(plan.checkpoint.save)
        self._saved = self._went_on_from = saved

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
        tag = staging_tag_of(state.iteration)
        from_rank_0(lambda: self._make_room(state.iteration))
        self._require_shared(self._directory / tag)
        self._write(tag, state.iteration)
        dist.barrier()
        files = self._record_files(self._directory / tag)
        dims = self._partition_dims()
        manifest = self._manifest(state, files, dims)

        def finish() -> None:
            write_manifest(self._directory / tag, manifest)
            publish(self._directory, state.iteration)

        from_rank_0(finish)
        self._saved = state.iteration
        self._prune(files)
        log.info(
            "  successfully saved checkpoint at iteration %7d to %s",
            state.iteration,
            self._directory,
        )

    def _make_room(self, iteration: int) -> None:
        """Have an empty folder to write to, on a disk that the checkpoint fits on."""
        clear_staging(self._directory, iteration)
        require_space(self._directory, expected_size(self._directory, self._plan))

    def _write(self, tag: str, iteration: int) -> None:
        try:
            self._engine.save(
                self._directory,
                tag,
                {"iteration": iteration},
                optimizer=self._plan.checkpoint.saves_optimizer,
                streams=self._plan.checkpoint.saves_streams,
            )
        except (OSError, RuntimeError) as error:
            if not is_full_disk(error):
                raise
            raise CheckpointError(
                f"--save {self._directory}: the checkpoint of iteration {iteration} cannot be "
                f"written ({error}); the older ones are as they were"
            ) from error

    def _prune(self, files: tuple[FileRecord, ...]) -> None:
        """Remove what is not kept any more, after reading again what was written last."""
        plan, newest = self._plan.checkpoint, self._directory / tag_of(self._saved)
        names = from_rank_0(
            lambda: superfluous(
                published_tags(self._directory),
                plan,
                newest=self._saved,
                in_use=self._went_on_from,
            )
        )
        if not names:
            return
        if problems := list(gathered(damage(newest, share_of(list(files))))):
            raise CheckpointError(
                f"--save {self._directory}: what was written is not what the disk holds, so no "
                f"older checkpoint is removed: {'; '.join(problems)}"
            )
        from_rank_0(lambda: prune(self._directory, names))

    def _record_files(self, folder: Path) -> tuple[FileRecord, ...]:
        """Hash the files of `folder`, every rank its share of them."""
        # Rank 0's list: another node may see the newest names a moment later.
        names = from_rank_0(lambda: sorted(file.name for file in folder.iterdir()))
        records = [record_file(folder / name) for name in share_of(names)]
        return tuple(sorted(gathered(records), key=lambda record: record.name))

    def _require_shared(self, folder: Path) -> None:
        """Refuse a --save that is another directory on another node."""
        blind = list(gathered([] if folder.is_dir() else [dist.get_rank()]))
        if blind:
            raise CheckpointError(
                f"--save {self._directory} is not the same directory for all ranks: rank 0's "
                f"folder in it is not there for ranks {blind}; give one on a shared file system"
            )

    def _partition_dims(self) -> dict[str, int]:
        parameters = self._engine.module.named_parameters()
        own = [(whole_name(name, p), shard.dim) for name, p in parameters if (shard := shard_of(p))]
        return dict(sorted(gathered(own)))

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


@contextmanager
def sole_writer(plan: Plan) -> Iterator[None]:
    """Keep other runs from writing to --save inside the `with` block. For all ranks, in step.

    Raises:
        CheckpointError: another run writes there.
    """
    with ExitStack() as stack:
        if plan.checkpoint.save:
            directory = Path(plan.checkpoint.save)
            from_rank_0(lambda: stack.enter_context(locked(directory)))
        yield


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
