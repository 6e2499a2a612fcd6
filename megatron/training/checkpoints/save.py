"""Save checkpoints of a run: all ranks write, rank 0 publishes; synchronous or asynchronous."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from megatron.checkpointing.disk_space import is_full_disk, make_room
from megatron.checkpointing.lock import require_kept
from megatron.checkpointing.manifest import (
    LOCK,
    UNREAD,
    FileRecord,
    Manifest,
    damage,
    iteration_of,
    names_in,
    published_tags,
    record_file,
    staging_tag_of,
    tag_of,
)
from megatron.checkpointing.publish import (
    discard_staging,
    prune,
    publish_written,
    removable,
)
from megatron.checkpointing.remote import (
    pending_uploads,
    prune_remote,
    url_of,
)
from megatron.checkpointing.train_state import TrainState
from megatron.checkpointing.writer import HostCopies, StateWriter, SynchronousExecutor
from megatron.common.errors import CheckpointError, MegatronError, reason
from megatron.common.remote_files import upload_all
from megatron.config.config import Config
from megatron.config.plan.plan import Plan
from megatron.engine.engine import Engine
from megatron.training.checkpoints.emergency_save import PendingSave, finish_alone
from megatron.training.checkpoints.system_info import system_info
from megatron.training.loop.collectives import (
    any_rank,
    from_rank_0,
    gather_findings,
    post,
    scatter,
)
from megatron.training.loop.loop import Hook, StepResult

log = logging.getLogger(__name__)

_Futures = Sequence[Future[Any]]
T = TypeVar("T")


class Checkpoints(Hook):
    """Save every --save-interval iterations; --async-save writes in the background. For all ranks.

    A save is the generator `_publish` and then `_prune`: between two of its yields all ranks
    communicate; at a yield each rank waits for its own files. With --async-save it is advanced
    between training steps only, when no rank has files left to write, one save at a time.

    Nothing is saved while the newest step has a NaN or infinite loss or gradient: the save that was
    due follows the next finite step. A checkpoint is proven by the first finite step after it, and
    only then may older ones be removed.

    Args:
        saved: the iteration whose checkpoint is in --save already; -1 for none.
        epoch: iterations of an epoch, at whose end there is a save too; 0 for none.
    """

    def __init__(
        self, engine: Engine, plan: Plan, config: Config, *, saved: int = -1, epoch: int = 0
    ):
        self._engine = engine
        self._plan = plan
        self._config = config
        self._intervals = [each for each in (plan.checkpoint.interval, epoch) if each]
        self._directory = Path(plan.checkpoint.save)
        self._url = url_of(self._directory)
        self._not_uploaded = ""  # why the newest checkpoint is not at the URL
        self._seeks_scale = plan.precision.dtype == "fp16"
        self._has_lock = (self._directory / LOCK).exists()
        self.system_info = system_info()
        in_background = plan.checkpoint.in_background
        self._executor: Executor = ThreadPoolExecutor(1) if in_background else SynchronousExecutor()
        self._copies = HostCopies() if in_background else None
        self._steps: Iterator[_Futures] = iter(())
        self._futures: _Futures | None = None
        self._pending: PendingSave | None = None
        self._claiming = threading.Lock()
        self.rewind_to(saved)

    def rewind_to(self, iteration: int) -> None:
        """Reset to the saved `iteration`, after which the run repeats its steps; -1 for none."""
        self._saved = self._resumed_from = iteration
        self._proven = -1
        self._is_finite, self._is_due, self._may_prune = True, False, False
        self._unverified: list[FileRecord] = []

    @property
    def is_under_way(self) -> bool:
        """Whether an asynchronous save is in progress; the same on all ranks."""
        return self._futures is not None

    def after_step(self, state: TrainState, step: StepResult) -> None:
        """Save if one is due; otherwise advance the asynchronous save in progress.

        Communication: every rank must call this, in step.
        """
        self._is_finite = step.is_finite(seeks_scale=self._seeks_scale)
        if self._saved > self._proven and not self._is_any_not_finite():
            self._proven, self._may_prune = self._saved, True
            if not self.is_under_way:
                self._start(self._prune())
        if self._is_due or any(state.iteration % each == 0 for each in self._intervals):
            self.save(state)
        elif self._futures is not None:
            # An error on one rank ends the run at once, also while other ranks still write.
            failed, busy = any_rank([bool(_errors(self._futures)), not _is_done(self._futures)])
            if failed or not busy:
                self._advance()

    def save(self, state: TrainState) -> bool:
        """Save a checkpoint of `state`, the weights and the optimizer, unless that exists already.

        Return False if nothing is saved because the newest step has a NaN or infinite loss or
        gradient. With --async-save the save may still be in progress afterwards; see `finish`.

        Communication: every rank must call this, in step.
        """
        if self._saved == state.iteration:
            return True
        if self._is_any_not_finite():
            if not self._is_due:
                log.warning(
                    "not saving at iteration %d: its loss or gradient is not finite; the next "
                    "finite step is saved",
                    state.iteration,
                )
            self._is_due = True
            return False
        self._is_due = False
        self.finish()
        log.info("saving checkpoint at iteration %7d to %s", state.iteration, self._directory)
        started_at = time.perf_counter()
        from_rank_0(lambda: self._make_room(state.iteration))
        self._require_shared(self._directory / staging_tag_of(state.iteration))
        manifest = self._manifest(state)
        files = self._write(state.iteration)
        self._saved = state.iteration
        self._pending = PendingSave(self._directory, manifest, files)
        if self._plan.checkpoint.in_background:
            seconds = time.perf_counter() - started_at
            log.info("  copied in %.2f s; training continues while it is written", seconds)
        self._start(self._publish(manifest, files))
        return True

    def finish(self) -> None:
        """Wait until the save in progress, if any, is published and outdated ones are removed.

        Communication: every rank must call this, in step.
        """
        while self._futures is not None:
            wait(self._futures)
            self._advance()

    def verify(self) -> None:
        """Read the newest checkpoint back from disk before the run ends, unless that is done.

        What the URL of --save lacks, also of an earlier run, is uploaded.

        Raises:
            CheckpointError: the disk does not hold what was written, or it cannot be uploaded.

        Communication: every rank must call this, in step.
        """
        damaged = damage(self._newest, self._unverified, forgets_cached=True)
        self._require_intact(damaged, "and the next start resumes from an older checkpoint")
        self._start(self._upload())
        self.finish()
        if self._not_uploaded:
            raise CheckpointError(
                f"{self._newest} is complete, but not uploaded to --save {self._url}: "
                f"{self._not_uploaded}; the same command attempts it again"
            )

    def rescue(self) -> None:
        """Publish the asynchronous save in progress, if any, of a run that fails.

        Ranks need not be in step, and any thread may call it. Errors are logged, not raised: the
        run ends for another reason.
        """
        pending = self._claim_pending()
        if pending is None or not self._plan.checkpoint.in_background:
            return
        iteration = pending.manifest.state.iteration
        try:
            if finish_alone(pending, rank=dist.get_rank(), ranks=dist.get_world_size()):
                self._log_saved(iteration)
        except CheckpointError as error:
            log.error("the checkpoint of iteration %d is not finished (%s)", iteration, error)

    def advice(self) -> str:
        """Name the checkpoint to resume from, for the error that ends a run with a NaN loss."""
        if self._saved < 0:
            return ""
        newest, iteration = tag_of(self._saved), self._saved
        if self._proven == iteration:
            return f"; the same command resumes from {newest}, which a finite step has followed"
        older = [
            i
            for tag in published_tags(self._directory)
            if (i := iteration_of(tag) or 0) < iteration
        ]
        message = f"; no finite step has followed {newest}, so its weights may be the cause: "
        if not older:
            return message + "start again in another --save if the next start fails too"
        return message + f"--ckpt-step {older[0]} resumes from the one before it"

    def _publish(
        self, manifest: Manifest, files: Sequence[Future[FileRecord]]
    ) -> Iterator[_Futures]:
        """Write, gather, publish, verify, prune; yield the futures that this rank waits for.

        Communication: all ranks advance it in step.
        """
        iteration = manifest.state.iteration
        folder = self._directory / staging_tag_of(iteration)
        yield files
        listed, unverified = self._exchange(files)

        # DeepSpeed writes some files itself.
        names: list[str] | None = None
        if dist.get_rank() == 0:
            names = sorted({*names_in(folder)} - {record.name for record in listed})
        if from_rank_0(lambda: bool(names)):
            share = scatter(names)
            hashed = [self._executor.submit(record_file, folder / name, name) for name in share]
            yield hashed
            further = self._exchange(hashed)
            listed, unverified = [*listed, *further[0]], [*unverified, *further[1]]

        pending = self._claim_pending()
        if pending is None:
            raise CheckpointError("the run, which hung, goes on while its watchdog ends it")
        publication = self._on_rank_0(publish_written, self._directory, manifest, listed)
        if publication:
            self._pending = replace(pending, publication=publication[0])
        yield publication
        self._pending = None
        self._log_saved(iteration)

        self._unverified, self._may_prune = unverified, True
        yield from self._upload()
        yield from self._prune()

    def _exchange(
        self, files: Sequence[Future[FileRecord]]
    ) -> tuple[list[FileRecord], list[FileRecord]]:
        """Return the records of all ranks' files, on rank 0, and the ones this rank will verify.

        They are another rank's, on another node if there are several: where they were not written.

        Communication: each rank's records to rank 0 and to one other rank.
        """
        posted = post([file.result() for file in files])
        rank, count = dist.get_rank(), dist.get_world_size()
        everyones = posted.all() if rank == 0 else []
        return [record for own in everyones for record in own], posted.of(
            (rank + max(1, count // 2)) % count
        )

    def _upload(self) -> Iterator[_Futures]:
        """Upload the checkpoints that the URL of --save lacks, if it has one; ranks share the files.

        A failure is logged: the next save tries again, and `verify` refuses to end the run so.

        Communication: all ranks advance it in step.
        """
        if not self._url:
            return
        listing = self._on_rank_0(_attempt(pending_uploads), self._directory)
        yield listing
        found, problem = listing[0].result() if listing else (None, "")
        files, last = found or (None, None)
        is_any, problem = from_rank_0(lambda: (bool(files), problem))
        problems = [problem] if problem else []
        if is_any:
            uploads = [self._executor.submit(_attempt(upload_all), scatter(files))]
            yield uploads
            problems = gather_findings([p for _, p in (uploads[0].result(),) if p])
        if is_any and not problems:
            manifests = self._on_rank_0(_attempt(upload_all), (), last)
            yield manifests
            _, problem = from_rank_0(lambda: manifests[0].result())
            problems = [problem] if problem else []
        self._not_uploaded = "; ".join(problems)
        if problems:
            log.warning(
                "%s is not uploaded to %s, which the next save attempts again: %s",
                *(self._newest, self._url, self._not_uploaded),
            )
        elif is_any:
            log.info("  uploaded checkpoint at iteration %7d to %s", self._saved, self._url)

    def _prune(self) -> Iterator[_Futures]:
        """Verify the newest checkpoint and remove outdated ones (--keep-last, --keep-every).

        Communication: all ranks advance it in step.
        """
        # A finite step may prove the newest checkpoint while this waits: then once more.
        while self._may_prune and self._plan.checkpoint.keep_last and not self._not_uploaded:
            self._may_prune = False
            outdated = from_rank_0(
                lambda: removable(
                    self._directory,
                    self._plan.checkpoint,
                    newest=self._saved,
                    in_use=self._resumed_from,
                    proven=self._proven,
                )
            )
            if outdated:
                damaged = self._executor.submit(
                    damage, self._newest, self._unverified, forgets_cached=True
                )
                yield [damaged]
                self._require_intact(damaged.result(), "so no older checkpoint is removed")
                yield self._on_rank_0(prune, self._directory, outdated)
            if self._url:
                yield self._on_rank_0(
                    partial(
                        prune_remote,
                        newest=self._saved,
                        in_use=self._resumed_from,
                        proven=self._proven,
                    ),
                    self._directory,
                    self._plan.checkpoint,
                )

    def _start(self, steps: Iterator[_Futures]) -> None:
        """Run `steps` to their first wait; without --async-save, to their end."""
        self._steps = steps
        self._futures = next(steps, None)
        if not self._plan.checkpoint.in_background:
            self.finish()

    def _advance(self) -> None:
        """Run the save to its next wait, after all ranks' futures are done or one has failed.

        Raises:
            CheckpointError: one has failed.
        """
        futures, self._futures = self._futures, None
        assert futures is not None
        if problems := gather_findings(_errors(futures)):
            self._pending = None
            # The staging folder cannot be removed while other ranks still write to it.
            busy = any_rank([not _is_done(futures)])[0]
            raise self._not_written(self._saved, "; ".join(problems), discards=not busy)
        self._futures = next(self._steps, None)

    def _on_rank_0(self, work: Callable[..., T], *args: Any) -> list[Future[T]]:
        return [self._executor.submit(work, *args)] if dist.get_rank() == 0 else []

    def _claim_pending(self) -> PendingSave | None:
        """Hand out the save to be published to one thread only: the run's or the watchdog's."""
        with self._claiming:
            claimed, self._pending = self._pending, None
        return claimed

    def _is_any_not_finite(self) -> bool:
        """Whether the newest step has a NaN or infinite loss or gradient on any rank.

        Communication: one all-reduce of a byte.
        """
        return any_rank([not self._is_finite])[0]

    @property
    def _newest(self) -> Path:
        return self._directory / tag_of(self._saved)

    def _log_saved(self, iteration: int) -> None:
        log.info(
            "  successfully saved checkpoint at iteration %7d to %s", iteration, self._directory
        )

    def _make_room(self, iteration: int) -> None:
        if self._has_lock:
            require_kept(self._directory)
        make_room(self._directory, iteration, self._plan)

    def _write(self, iteration: int) -> Sequence[Future[FileRecord]]:
        """Have the engine write its states of this rank to the staging folder."""
        writer = StateWriter(self._executor, self._copies)
        try:
            with writer.copying():
                self._engine.save(
                    self._directory,
                    staging_tag_of(iteration),
                    {"iteration": iteration},
                    optimizer=self._plan.checkpoint.saves_optimizer,
                    streams=self._plan.checkpoint.saves_streams,
                    write=writer.write,
                )
        except (OSError, RuntimeError) as error:
            if not is_full_disk(error):
                raise
            raise self._not_written(iteration, error, discards=False) from error
        return writer.files

    def _not_written(self, iteration: int, why: object, *, discards: bool) -> CheckpointError:
        """Build the error of a failed save.

        Args:
            discards: whether no rank writes any more, so that the staging folder can be removed.
                Communication: one broadcast then.
        """
        if discards and from_rank_0(lambda: discard_staging(self._directory, iteration)):
            left = "and nothing is left of it"
        else:
            tag = staging_tag_of(iteration)
            left = f"and the next start or save removes its incomplete files in {tag}"
        return CheckpointError(
            f"--save {self._directory}: the checkpoint of iteration {iteration} cannot be written "
            f"({why}); the older ones are as they were, {left}"
        )

    def _require_intact(self, damaged: list[str], consequence: str) -> None:
        """Refuse a newest checkpoint of which any rank has found damaged files.

        Communication: one all-reduce of a byte.
        """
        if problems := gather_findings(damaged):
            if all(f" {UNREAD}: " in problem for problem in problems):
                found = "the newest checkpoint cannot be verified, and may be undamaged"
            else:
                found = f"the file on disk differs from what was written, {consequence}"
            raise CheckpointError(f"--save {self._directory}: {found}: {'; '.join(problems)}")
        self._unverified = []

    def _require_shared(self, folder: Path) -> None:
        """Refuse a --save that is another directory on another node."""
        blind = gather_findings([] if folder.is_dir() else [dist.get_rank()])
        if blind:
            raise CheckpointError(
                f"--save {self._directory} is not the same directory for all ranks: rank 0's "
                f"folder in it is not there for ranks {blind}; give one on a shared file system"
            )

    def _manifest(self, state: TrainState) -> Manifest:
        """Build the manifest without its list of files.

        Communication: one all-gather of the partition dimensions over the ranks of a replica.
        """
        return Manifest(
            state=replace(state),
            plan=self._plan.to_dict(),
            config=asdict(self._config),
            versions=dict(self.system_info),
            partition_dims=self._engine.partition_dims(),
            files=(),
        )


def _attempt(work: Callable[..., T]) -> Callable[..., tuple[T | None, str]]:
    """Return `work` with its result and no message, or no result and the message of its error."""

    def attempt(*args: Any) -> tuple[T | None, str]:
        try:
            return work(*args), ""
        except (OSError, MegatronError) as error:
            return None, reason(error)

    return attempt


def _is_done(futures: _Futures) -> bool:
    return all(future.done() for future in futures)


def _errors(futures: _Futures) -> list[str]:
    """Describe this rank's errors so far."""
    errors = (future.exception() for future in futures if future.done())
    words = (
        str(error) if isinstance(error, MegatronError) else repr(error) for error in errors if error
    )
    return [f"rank {dist.get_rank()}: {word}" for word in words]
