"""Checkpoints of a run: written by all ranks, published once."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.checkpointing.disk_space import expected_size, is_full_disk, require_space
from megatron.checkpointing.host_copy import HostCopies
from megatron.checkpointing.manifest import FileRecord, Manifest, damage, names_in, record_file
from megatron.checkpointing.names import (
    LOCK,
    iteration_of,
    published_tags,
    staging_tag_of,
    tag_of,
)
from megatron.checkpointing.publish import clear_staging, discard_staging, publish_written
from megatron.checkpointing.retention import prune, removable
from megatron.checkpointing.writer import AtOnce, StateWriter
from megatron.common.errors import CheckpointError, MegatronError
from megatron.config.config import Config
from megatron.config.plan import Plan
from megatron.engine.engine import Engine
from megatron.tensor_parallel.experts import whole_name
from megatron.tensor_parallel.sharding import shard_of
from megatron.training.checkpoints.emergency_save import UnderWay, finish_alone
from megatron.training.checkpoints.system_info import system_info
from megatron.training.guards.nan_guard import is_finite
from megatron.training.loop.collectives import agreed, from_rank_0, gathered, share_of
from megatron.training.loop.loop import Hook, StepResult
from megatron.training.loop.state import TrainState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Stage:
    """A part of a save: what this rank does alone, and then all ranks together.

    Args:
        work: what is done alone, maybe while training goes on.
        then: what follows when all ranks have done theirs; returns the next stage if there is one.
    """

    work: Sequence[Future[Any]]
    then: Callable[[], "_Stage | None"]


class Checkpoints(Hook):
    """Saves every --save-interval iterations, if there is one. For all ranks.

    With --async-save a save goes on in the background, one at a time: its collectives happen
    between steps only, where all ranks are in step.

    Nothing is saved while the newest step has no finite loss and gradient: the save that was due
    follows the next finite step. A checkpoint is proven by the first finite step after it, and
    only then may it take the place of older ones.

    Args:
        saved: the iteration whose checkpoint is in --save already, if there is one.
    """

    def __init__(self, engine: Engine, plan: Plan, config: Config, *, saved: int = -1):
        self._engine = engine
        self._plan = plan
        self._config = config
        self._directory = Path(plan.checkpoint.save)
        self._seeks_scale = plan.precision.dtype == "fp16"
        self._saved = self._went_on_from = saved
        self._proven = -1
        self._is_finite, self._is_owed, self._is_untidy = True, False, False
        self._has_lock = (self._directory / LOCK).exists()
        self.system_info = system_info()
        in_background = plan.checkpoint.in_background
        self._executor: Executor = ThreadPoolExecutor(1) if in_background else AtOnce()
        self._copies = HostCopies() if in_background else None
        self._stage: _Stage | None = None
        self._unpublished: UnderWay | None = None
        self._taking = threading.Lock()
        self._unread: list[FileRecord] = []

    @property
    def is_under_way(self) -> bool:
        """Whether a save goes on in the background; the same on all ranks."""
        return self._stage is not None

    def after_step(self, state: TrainState, step: StepResult) -> None:
        """Save when it is due; otherwise look after the save that is under way."""
        self._is_finite = is_finite(step, seeks_scale=self._seeks_scale)
        if self._saved > self._proven and not self._is_any_not_finite():
            self._proven, self._is_untidy = self._saved, True
            self._tidy()
        interval = self._plan.checkpoint.interval
        if self._is_owed or (interval and state.iteration % interval == 0):
            self.save(state)
        elif self._stage:
            # Failures first: nobody waits for ranks that still write.
            failed, busy = agreed([bool(_errors(self._stage)), not _is_done(self._stage)])
            if failed or not busy:
                self._go_on()

    def save(self, state: TrainState) -> bool:
        """Save `state` and everything behind it, unless this very iteration is saved.

        Return False where nothing is saved because the newest step has no finite loss and
        gradient. With --async-save the save may be under way when this returns; see `finish`.

        Communication: every rank must call this, in step.
        """
        if self._saved == state.iteration:
            return True
        if self._is_any_not_finite():
            if not self._is_owed:
                log.warning(
                    "not saving at iteration %d: its loss or gradient is not finite; the next "
                    "finite step is saved",
                    state.iteration,
                )
            self._is_owed = True
            return False
        self._is_owed = False
        self.finish()
        log.info("saving checkpoint at iteration %7d to %s", state.iteration, self._directory)
        started_at = time.perf_counter()
        tag = staging_tag_of(state.iteration)
        from_rank_0(lambda: self._make_room(state.iteration))
        self._require_shared(self._directory / tag)
        manifest = self._manifest(state)
        writer = StateWriter(self._executor, self._copies)
        self._write(tag, state.iteration, writer)
        self._saved = state.iteration
        self._stage = _Stage(writer.files, lambda: self._gathering(writer, manifest))
        self._unpublished = UnderWay(self._directory, manifest, writer.files)
        if self._plan.checkpoint.in_background:
            seconds = time.perf_counter() - started_at
            log.info("  copied in %.2f s; training goes on while it is written", seconds)
        else:
            self.finish()
        return True

    def advice(self) -> str:
        """Return which checkpoint to go on from after a run that ends without a finite loss."""
        if self._saved < 0:
            return ""
        newest, iteration = tag_of(self._saved), self._saved
        if self._proven == iteration:
            return f"; the same command goes on from {newest}, which a finite step has followed"
        older = [
            i
            for tag in published_tags(self._directory)
            if (i := iteration_of(tag) or 0) < iteration
        ]
        message = f"; no finite step has followed {newest}, so its weights may be the cause: "
        if not older:
            return message + "start again in another --save if the next start fails too"
        return message + f"--ckpt-step {older[0]} goes on from the one before it"

    def goes_on_from(self, iteration: int) -> None:
        """Note that the run is where it saved `iteration`, and steps behind it come again."""
        self._saved = self._went_on_from = iteration
        self._proven = -1
        self._is_finite, self._is_owed, self._is_untidy = True, False, False
        self._unread = []  # of steps that do not count any more

    def finish(self) -> None:
        """Wait until the save under way, if there is one, is published and the rest is removed.

        Communication: every rank must call this, in step.
        """
        while self._stage:
            wait(self._stage.work)
            self._go_on()

    def verify(self) -> None:
        """Read again what was written last, unless that is done, for a run that ends here.

        Raises:
            CheckpointError: the disk does not hold what was written.

        Communication: every rank must call this, in step.
        """
        newest = self._directory / tag_of(self._saved)
        found = damage(newest, share_of(self._unread), forgets_cached=True)
        if problems := list(gathered(found)):
            raise CheckpointError(
                f"--save {self._directory}: what was written is not what the disk holds, and the "
                f"next start goes on from an older checkpoint: {'; '.join(problems)}"
            )
        self._unread = []

    def rescue(self) -> None:
        """Publish what is being written in the background, if anything is, for a run that fails.

        The ranks need not be in step, and the thread may be another than that of the run. What
        cannot be done is told, and raised is nothing: the run ends for another reason.
        """
        save = self._take_unpublished()
        if save is None or not self._plan.checkpoint.in_background:
            return
        iteration = save.manifest.state["iteration"]
        try:
            if finish_alone(save, rank=dist.get_rank(), ranks=dist.get_world_size()):
                self._tell_saved(iteration)
        except CheckpointError as error:
            log.error("the checkpoint of iteration %d is not finished (%s)", iteration, error)

    def _is_any_not_finite(self) -> bool:
        """Whether any rank sees a newest step without a finite loss and gradient.

        Communication: one all-reduce of a byte.
        """
        return agreed([not self._is_finite])[0]

    def _tell_saved(self, iteration: int) -> None:
        log.info(
            "  successfully saved checkpoint at iteration %7d to %s", iteration, self._directory
        )

    def _go_on(self) -> None:
        """Do what follows on this stage, whose work is done or has failed on some rank.

        Raises:
            CheckpointError: it has failed.
        """
        stage, self._stage = self._stage, None
        assert stage
        if problems := list(gathered(_errors(stage))):
            self._unpublished = None
            # What others still write cannot go yet.
            busy = agreed([not _is_done(stage)])[0]
            raise self._not_written(self._saved, "; ".join(problems), is_over=not busy)
        self._stage = stage.then()
        self._tidy()

    def _make_room(self, iteration: int) -> None:
        """Have an empty folder to write to, on a disk that the checkpoint fits on."""
        self._require_not_moved()
        staging = clear_staging(self._directory, iteration)
        try:
            require_space(self._directory, expected_size(self._directory, self._plan))
        except CheckpointError:
            with suppress(OSError):
                staging.rmdir()
            raise
        except OSError as error:
            raise CheckpointError(f"--save {self._directory}: {error}") from error

    def _require_not_moved(self) -> None:
        """Refuse to write to a directory without the lock that this run began with.

        Raises:
            CheckpointError: it was removed, renamed or emptied meanwhile, or its disk is gone.
        """
        if self._has_lock and not (self._directory / LOCK).exists():
            raise CheckpointError(
                f"--save {self._directory} has lost the {LOCK} of this run: the directory was "
                "removed, renamed, emptied or unmounted meanwhile; nothing more is written there: "
                "put it back, and start the same command again"
            )

    def _write(self, tag: str, iteration: int, writer: StateWriter) -> None:
        try:
            with writer.copying():
                self._engine.save(
                    self._directory,
                    tag,
                    {"iteration": iteration},
                    optimizer=self._plan.checkpoint.saves_optimizer,
                    streams=self._plan.checkpoint.saves_streams,
                    write=writer.write,
                )
        except (OSError, RuntimeError) as error:
            if not is_full_disk(error):
                raise
            raise self._not_written(iteration, error, is_over=False) from error

    def _not_written(self, iteration: int, why: object, *, is_over: bool) -> CheckpointError:
        """Return what is to be told; where nobody writes any more, give the room back before.

        Args:
            is_over: whether that is so. Communication: one broadcast then.
        """
        if is_over and from_rank_0(lambda: discard_staging(self._directory, iteration)):
            left = "and nothing is left of it"
        else:
            tag = staging_tag_of(iteration)
            left = f"and what there is of it, in {tag}, goes with the next start or save"
        return CheckpointError(
            f"--save {self._directory}: the checkpoint of iteration {iteration} cannot be written "
            f"({why}); the older ones are as they were, {left}"
        )

    def _gathering(self, writer: StateWriter, manifest: Manifest) -> _Stage | None:
        """List what all ranks have written, and have files that DeepSpeed wrote by itself hashed."""
        folder = self._directory / staging_tag_of(manifest.state["iteration"])
        records = list(gathered([file.result() for file in writer.files]))
        # Rank 0's list: another node may see the newest names a moment later.
        others = from_rank_0(
            lambda: sorted(set(names_in(folder)) - {record.name for record in records})
        )
        if not others:
            return self._publication(manifest, records)
        found = [
            self._executor.submit(record_file, folder / name, name) for name in share_of(others)
        ]
        return _Stage(
            found,
            lambda: self._publication(
                manifest, [*records, *gathered([file.result() for file in found])]
            ),
        )

    def _publication(self, manifest: Manifest, records: list[FileRecord]) -> _Stage:
        """Have rank 0 make the files count, which are all on disk."""
        unpublished = self._take_unpublished()
        if unpublished is None:
            raise CheckpointError("the run, which hung, goes on while its watchdog ends it")
        work = []
        if dist.get_rank() == 0:
            work = [self._executor.submit(publish_written, self._directory, manifest, records)]
            self._unpublished = replace(unpublished, publication=work[0])
        return _Stage(work, lambda: self._published(manifest.state["iteration"], records))

    def _take_unpublished(self) -> UnderWay | None:
        """Return it to one thread only."""
        with self._taking:
            taken, self._unpublished = self._unpublished, None
        return taken

    def _published(self, iteration: int, files: list[FileRecord]) -> None:
        self._unpublished = None
        self._tell_saved(iteration)
        self._unread, self._is_untidy = files, True

    def _tidy(self) -> None:
        """Begin to remove what is not kept any more, once nothing else is under way."""
        if self._stage or not self._is_untidy:
            return
        self._is_untidy = False
        if self._plan.checkpoint.keep_last:
            self._stage = self._verification()
        if not self._plan.checkpoint.in_background:
            self.finish()

    def _verification(self) -> _Stage | None:
        """Read again what was written last, if older checkpoints go because of it."""
        names = from_rank_0(
            lambda: removable(
                self._directory,
                self._plan.checkpoint,
                newest=self._saved,
                in_use=self._went_on_from,
                proven=self._proven,
            )
        )
        if not names:
            return None
        newest = self._directory / tag_of(self._saved)
        found = self._executor.submit(damage, newest, share_of(self._unread), forgets_cached=True)
        return _Stage([found], lambda: self._removal(names, found.result()))

    def _removal(self, names: list[str], found: list[str]) -> _Stage:
        """Remove what is not kept any more, unless the newest is damaged on some rank's word."""
        if problems := list(gathered(found)):
            raise CheckpointError(
                f"--save {self._directory}: what was written is not what the disk holds, so no "
                f"older checkpoint is removed: {'; '.join(problems)}"
            )
        self._unread = []
        removes = dist.get_rank() == 0
        work = [self._executor.submit(prune, self._directory, names)] if removes else []
        return _Stage(work, lambda: None)

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

    def _manifest(self, state: TrainState) -> Manifest:
        """Return all of it but the files."""
        return Manifest(
            state=asdict(state),
            plan=asdict(self._plan),
            config=asdict(self._config),
            versions=dict(self.system_info),
            partition_dims=self._partition_dims(),
            files=(),
        )


def _is_done(stage: _Stage) -> bool:
    return all(future.done() for future in stage.work)


def _errors(stage: _Stage) -> list[str]:
    """Return what has gone wrong so far on this rank."""
    errors = (future.exception() for future in stage.work if future.done())
    words = (
        str(error) if isinstance(error, MegatronError) else repr(error) for error in errors if error
    )
    return [f"rank {dist.get_rank()}: {word}" for word in words]
