"""Watchdog thread: ends a run that hangs, or whose launcher or peers have died."""

import logging
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatron.common.errors import ExitCode, MegatronError, PeerLeftError
from megatron.training.process.dead_ranks import Peers
from megatron.training.process.failure import Failure, FailureFile, failure_of, locate_failure
from megatron.training.process.launchers import Launchers, write_root_cause
from megatron.training.process.node_messages import NodeMessages
from megatron.training.process.stack_dump import (
    groups_of_ranks,
    take_stacks,
    write_stacks,
)
from megatron.training.process.starting_peers import StartingPeers

log = logging.getLogger(__name__)

LONGER = 5
"""Factor on a step's timeout for each part of the start, the first step and a save.

What is done before a hung run ends may take as long.
"""

START_S = 90.0
"""Least timeout of each part of the start: programs are read from disks, processes of
other hosts start later, and the lock of a dead run on another host is waited for."""

SAVING_GRACE_S = 120.0
"""Time that a run has to save and exit after its launcher has died."""

PEER_GRACE_S = 30.0
"""Time after the end of another rank in which this rank may still end with its own error."""

_POLL_S = 1.0
"""Least interval at which a rank polls the disk for messages of other ranks."""

_POLLS_PER_S = 100
"""Most polls of the shared disk by all ranks together, however many they are: where a rank polls less
often than every second, a rank that has found something sends it to the other ranks of its host."""

_STEP = "step"
_HANG, _FAILED = "hang", "failed"


@dataclass(frozen=True)
class Hangs:
    """Hang detection: the timeout, and where ranks dump their stacks.

    Args:
        timeout_s: without progress.
        folder: where all ranks write their stacks; it does not exist before a hang.
        world_size: number of ranks.
    """

    timeout_s: float
    folder: Path
    world_size: int


class Watchdog:
    """Tracks the progress of this rank, records its failure, and ends it when it hangs.

    Args:
        failures: where causes are written.
        launchers: whose end this run follows.
        starting: the ranks of this host before the rendezvous; their failure ends this run.
    """

    def __init__(
        self,
        failures: FailureFile,
        *,
        rank: int,
        launchers: Launchers | None = None,
        starting: StartingPeers | None = None,
        peer_grace_s: float = PEER_GRACE_S,
    ):
        self.failures = failures
        self.stage = "starting"
        self.iteration = 0
        # Whether the run itself leaves, after a save, when a launcher has ended.
        self.saves_when_lost = False
        # Who else there is, once the ranks have met.
        self.peers = Peers(())
        # Whether to leave when another rank has ended: NCCL, and whoever waits for a rank in the
        # store, would wait for it without an error.
        self.follows_peers = starting is not None
        self._starting = starting
        # What a hung run still does, next to the main thread.
        self.before_leaving: Callable[[], None] = lambda: None
        self._rank = rank
        self._written_down: BaseException | None = None
        self._is_reported_elsewhere = False
        self._code_of_cause = ExitCode.FAILED
        self._messages: NodeMessages | None = None
        self._world_size = 1
        self._next_poll_at = 0.0
        self._launchers = launchers or Launchers(is_parent=False)
        self._lost_at: float | None = None
        self._peer_grace_s = peer_grace_s
        self._peer_lost_at: float | None = None
        self._hangs: Hangs | None = None
        self._factor, self._least_s = LONGER, START_S
        self._moved_at = time.monotonic()
        self._others_hang, self._is_reported = threading.Event(), threading.Event()
        self._others_failed = threading.Event()
        self._ended = threading.Event()
        self._leaving = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch inside the `with` block; write down the exception that leaves it.

        A connection that was lost to a rank that wrote down why it left becomes a PeerLeftError.
        Wrong flags, or files that they name, are no failure of a run: nothing was begun.
        """
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        threading.Thread(target=self._poll, name="watchdog of other ranks", daemon=True).start()
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            is_misuse = isinstance(error, MegatronError) and error.exit_code == ExitCode.MISUSED
            if not (is_misuse or isinstance(error, PeerLeftError)):
                self.write_down(error)
            if self._is_reported_elsewhere:
                raise self._peer_left() from error
            raise
        finally:
            self._ended.set()

    def write_down(self, error: BaseException) -> None:
        """Write down the exception that ends this rank, once."""
        if error is not self._written_down:
            self._written_down = error
            failure = failure_of(
                error,
                rank=self._rank,
                iteration=self.iteration,
                stage=self.stage,
                peers=self._peers(),
            )
            is_first = self.failures.record(failure) or not self.failures.is_written()
            # A rank that recorded its failure has printed it too.
            self._is_reported_elsewhere = (
                failure.kind in ("lost rank", "lost peer") and not is_first
            )
            if failure.kind == "lost rank" and is_first:
                log.error(failure.message)

    def arm(self, hangs: Hangs) -> None:
        """End the run from now on when it hangs; called again, with another folder for stacks."""
        self._moved_at = time.monotonic()
        self._hangs = hangs
        self._schedule_polls(hangs.world_size, random.random())

    def set_peers(self, peers: Peers, *, world_size: int) -> None:
        """Record the other ranks, and share the polls of the disk with the ranks of this host."""
        self.peers = peers
        self._forget_start()
        here = peers.on_this_host()
        this_rank = next((peer for peer in here if peer.rank == self._rank), None)
        if this_rank:
            self._messages = NodeMessages(
                this_rank, [peer for peer in here if peer is not this_rank]
            )
            self._schedule_polls(world_size, here.index(this_rank) / len(here))

    def _schedule_polls(self, world_size: int, turn: float) -> None:
        """Poll the disk as often as one of so many ranks may, the first time after that fraction."""
        self._world_size = world_size
        interval_s = _interval_s(world_size)
        self._next_poll_at = time.monotonic() + turn * interval_s if interval_s > _POLL_S else 0.0

    def disarm(self) -> None:
        """Stop watching for hangs and ended ranks: this process waits for other ranks."""
        self._hangs, self.follows_peers = None, False
        self._forget_start()

    def _forget_start(self) -> None:
        starting, self._starting = self._starting, None
        if starting:
            starting.close()

    def _peers(self) -> Peers:
        starting = self._starting
        return starting.peers() if starting else self.peers

    def enter_stage(self, stage: str) -> None:
        """Record that this part of the start begins, before the first step."""
        self.stage, self._factor, self._least_s = stage, LONGER, START_S
        self.record_progress()

    def raise_if_over(self) -> None:
        """Leave the start when another rank has written down why the run fails.

        Raises:
            PeerLeftError: it has.
        """
        if self.failures.is_written():
            raise self._peer_left()

    def _peer_left(self) -> PeerLeftError:
        return PeerLeftError(
            f"another rank has ended the run: {self.failures.file} contains the cause",
            self.failures.exit_code(),
        )

    def enter_step(self, iteration: int) -> None:
        """Record that step `iteration` begins."""
        self._factor, self._least_s = 1 if self.stage == _STEP else LONGER, 0.0
        self.stage, self.iteration = _STEP, iteration
        self.record_progress()

    def record_progress(self) -> None:
        """Record progress; block for ever once the run is being ended."""
        if self._leaving.is_set():
            threading.Event().wait()
        self._moved_at = time.monotonic()

    @contextmanager
    def during(self, stage: str, *, longer: bool = False) -> Iterator[None]:
        """Name the stage of the `with` block.

        Args:
            longer: whether it may take longer than a step.
        """
        before = self.stage, self._factor, self._least_s
        self.stage, self._factor, self._least_s = stage, LONGER if longer else 1, 0.0
        self.record_progress()
        yield
        self.record_progress()
        self.stage, self._factor, self._least_s = before

    def is_launcher_lost(self) -> bool:
        """Whether a launcher above this process has ended."""
        return self._lost_at is not None

    def _watch(self) -> None:
        while not self._ended.wait(self._pause_s()):
            if self._launchers.are_gone():
                self._follow_launcher()
            if self.follows_peers and self._written_down is None:
                self._follow_peers()
            if self._hangs and self.is_stuck():
                self._end_hung(self._hangs)

    def _poll(self) -> None:
        # A separate thread, because it may block on a dead disk.
        while not self._ended.is_set():
            self._handle(self._receive(self._pause_s()))
            if time.monotonic() < self._next_poll_at:
                continue
            if (interval_s := _interval_s(self._world_size)) > _POLL_S:
                self._next_poll_at = time.monotonic() + interval_s
            for event in self._events_on_disk():
                self._handle(event)
                if self._messages:
                    self._messages.send(event)

    def _receive(self, timeout_s: float) -> str | None:
        if self._messages is None:
            self._ended.wait(timeout_s)
            return None
        return self._messages.receive(timeout_s)

    def _events_on_disk(self) -> Iterator[str]:
        """Yield reports that other ranks wrote to the disk: of hangs, or why they ended."""
        if self._hangs and os.path.exists(self._hangs.folder):
            yield _HANG
        if self.follows_peers and self.failures.is_written():
            yield _FAILED

    def _handle(self, event: str | None) -> None:
        if event == _HANG:
            self._others_hang.set()
        elif event == _FAILED and self.follows_peers:
            self._others_failed.set()

    def _pause_s(self) -> float:
        return min(_POLL_S, self._hangs.timeout_s / 4) if self._hangs else _POLL_S

    def _follow_launcher(self) -> None:
        self._lost_at = self._lost_at or time.monotonic()
        if self.saves_when_lost and time.monotonic() < self._lost_at + SAVING_GRACE_S:
            return
        message = "the launcher of this process has ended, and the run did not leave by itself"
        failure = Failure(
            kind="lost launcher",
            rank=self._rank,
            iteration=self.iteration,
            stage=self.stage,
            message=message,
        )
        self.failures.record(failure)
        self._write_message(message)
        self._leave(message)

    def _follow_peers(self) -> None:
        if not (self._others_failed.is_set() or self._peers().ended_peers()):
            self._peer_lost_at = None
            return
        self._peer_lost_at = self._peer_lost_at or time.monotonic()
        if time.monotonic() < self._peer_lost_at + self._peer_grace_s:
            return
        self._leaving.set()
        # A thread, as it may wait for a dead disk.
        last = threading.Thread(target=self._report_lost_rank, name="report", daemon=True)
        last.start()
        last.join(LONGER * self._hangs.timeout_s if self._hangs else SAVING_GRACE_S)
        self._leave("another rank has ended, for which this one would wait", self._code_of_cause)

    def _report_lost_rank(self) -> None:
        """Write the cause to disk and stderr, and finish a save in progress."""
        failure = Failure(
            kind="lost peer",
            rank=self._rank,
            iteration=self.iteration,
            stage=self.stage,
            message=f"no progress in {self.stage} for {self._peer_grace_s:g} s",
        )
        failure = locate_failure(failure, self._peers())
        if self.failures.record(failure) or not self.failures.is_written():
            self._write_message(failure.message)
        else:
            left = self._peer_left()
            self._code_of_cause = left.exit_code
            self._write_message(str(left))
        self.before_leaving()

    def is_stuck(self) -> bool:
        """Whether this rank, once armed, has had no progress for too long, or another reports so."""
        passed = time.monotonic() - self._moved_at
        return self._others_hang.is_set() or bool(
            self._hangs and passed > self._limit_s(self._hangs)
        )

    def _limit_s(self, hangs: Hangs) -> float:
        return max(hangs.timeout_s * self._factor, self._least_s)

    def _end_hung(self, hangs: Hangs) -> None:
        self._leaving.set()
        # A thread, as it may wait for a dead disk.
        last = threading.Thread(target=self._report, args=(hangs,), name="report", daemon=True)
        last.start()
        last.join(_patience_s(hangs) + 3 * _POLL_S + LONGER * hangs.timeout_s)
        if not self._is_reported.is_set():
            self._write_message(
                f"hang in {self.stage}: no progress for {self._limit_s(hangs):g} s "
                f"(--hang-timeout), and {hangs.folder.parent} does not answer"
            )
        self._leave(f"hang in {self.stage}: no progress (--hang-timeout); see {hangs.folder}")

    def _report(self, hangs: Hangs) -> None:
        """Write the stacks and the cause to disk and stderr, and finish a save in progress."""
        host, pid = socket.gethostname(), os.getpid()
        stage = f"{self.stage} {self.iteration}" if self.stage == _STEP else self.stage
        with suppress(OSError):
            write_stacks(
                take_stacks(rank=self._rank, host=host, pid=pid, stage=stage), hangs.folder
            )
        groups = groups_of_ranks(
            hangs.folder,
            rank=self._rank,
            world_size=hangs.world_size,
            patience_s=_patience_s(hangs),
            poll_s=_interval_s(hangs.world_size) / 5,
        )
        message = f"no progress for {self._limit_s(hangs):g} s (--hang-timeout)"
        failure = Failure(
            kind="hang",
            rank=self._rank,
            iteration=self.iteration,
            stage=self.stage,
            message=message,
            groups=groups,
        )
        lines = [f"hang in {stage}: {message}", *groups, f"stacks of all threads: {hangs.folder}"]
        # One rank prints; other ranks leave a moment for that. Where nothing can be written, none
        # has been the first.
        if self.failures.record(failure) or (self._rank == 0 and not self.failures.is_written()):
            self._write_message("\n  ".join(lines))
            write_root_cause("\n".join(lines))
        else:
            time.sleep(_POLL_S)
        self._is_reported.set()
        self.before_leaving()

    def _write_message(self, message: str) -> None:
        prefix = f"[rank {self._rank}] " if self._rank else ""
        print(f"error: {prefix}{message}", file=sys.stderr, flush=True)

    def _leave(self, cause: str, code: ExitCode = ExitCode.FAILED) -> None:
        write_root_cause(cause)
        # Past the main thread, which may wait inside compiled code for ever.
        os._exit(code)


def next_start_folder(directory: Path) -> Path:
    """Return the folder for stack dumps of ranks before their rendezvous."""
    earlier = sum(1 for _ in directory.glob("hang-start-*"))
    return directory / f"hang-start-{earlier + 1}"


def _interval_s(world_size: int) -> float:
    """Return the polling interval of a rank on the shared disk."""
    return max(_POLL_S, world_size / _POLLS_PER_S)


def _patience_s(hangs: Hangs) -> float:
    """Return the timeout for the stack dumps of other ranks."""
    return max(5 * _POLL_S, 1.5 * _interval_s(hangs.world_size)) + hangs.timeout_s / 4
