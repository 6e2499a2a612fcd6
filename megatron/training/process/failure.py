"""Failure record of a run: `failure.json` in --save, written by the first process with a cause."""

import json
import os
import re
import socket
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from megatron.checkpointing.lock import dead_owner, owner_of
from megatron.checkpointing.manifest import LOCK
from megatron.common.atomic_files import open_regular, require_regular
from megatron.common.errors import ExitCode, MegatronError, WrongCheckpointError
from megatron.training.loop.journal import time_of
from megatron.training.process.dead_ranks import Peer, Peers

FAILURE = "failure.json"

_LOST_PEER = (
    "Connection reset",
    "Connection closed",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
    "remote process exited",
    "NCCL communicator was aborted",
)
"""Messages of gloo and nccl on ranks whose peer has died."""

Identity = tuple[int, int]
"""Identity of a failure.json: its inode and modification time."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Failure that ended a run, as failure.json records it."""

    kind: Literal["error", "lost rank", "lost peer", "lost launcher", "hang"]
    rank: int  # of a lost rank: the one that is gone
    iteration: int  # the step that was under way
    stage: str  # what the run was doing
    message: str
    traceback: str = ""
    groups: list[str] = field(default_factory=list)  # of a hang: which ranks were where
    exit_code: ExitCode = ExitCode.FAILED  # of all ranks
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    time: str = field(
        default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds")
    )

    @property
    def at(self) -> datetime | None:
        """Time of the failure; None if the record has none."""
        return time_of(self.time)

    @property
    def text(self) -> str:
        """Kind, location and message."""
        where = f"rank {self.rank} on {self.host}, {self.stage}"
        return f"{self.kind} ({where}): {self.message}"

    @property
    def signature(self) -> tuple[str, int, str]:
        """Key that equal failures at the same step share.

        Numbers in the message do not count: addresses, times and process numbers differ.
        """
        if self.kind != "error":
            return self.kind, self.iteration, ""
        return self.kind, self.iteration, re.sub(r"\d+", "#", self.message)


def is_lost_peer(error: BaseException) -> bool:
    """Whether the error only reports that another process has died."""
    return any(sign in str(error) for sign in _LOST_PEER)


def failure_of(
    error: BaseException, *, rank: int, iteration: int, stage: str, peers: Peers | None = None
) -> Failure:
    """Return the record of an exception that is being handled.

    Args:
        peers: among whom the one is looked for that a lost connection was with.
    """
    failure = Failure(
        kind="lost peer" if is_lost_peer(error) else "error",
        rank=rank,
        iteration=iteration,
        stage=stage,
        message=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
        exit_code=_exit_code_of(error),
    )
    return locate_failure(failure, peers) if failure.kind == "lost peer" and peers else failure


def _exit_code_of(error: BaseException) -> ExitCode:
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    return error.exit_code if isinstance(error, MegatronError) else ExitCode.FAILED


def locate_failure(failure: Failure, peers: Peers) -> Failure:
    """Return the record of a lost connection with whom it was lost, as far as can be known."""
    met = f"rank {failure.rank} then failed with: {failure.message}"
    if gone := peers.wait_for_ended():
        names = " and ".join(map(str, gone))
        how = (
            "without a message, as after kill -9, a crash of compiled code, or when memory runs out"
            if peers.have_met
            else "before the processes had met: its output has the cause, unless it was killed"
        )
        message = f"{names} ended {how}; {met}"
        first = gone[0]
        return replace(
            failure,
            kind="lost rank",
            rank=first.rank,
            host=first.host,
            pid=first.pid,
            message=message,
        )
    if elsewhere := peers.on_other_hosts():
        message = (
            f"a rank ended without a message; those of {failure.host} are there, so it was on "
            f"{elsewhere}; {met}"
        )
        return replace(failure, message=message)
    return failure


class FailureFile:
    """One process's view of `directory`/failure.json.

    The first cause stays: a later one is not written. A consequence on another rank, a lost peer,
    is replaced by the name of the lost rank, and both by a cause, whichever is first. The file of
    an earlier attempt moves to failure-N.json.

    Args:
        directory: --save; empty for none, and then nothing is written.
    """

    def __init__(self, directory: str):
        self._directory = Path(directory) if directory else None
        self._stale = self._identity()
        self._leader: Peer | None = None

    @property
    def file(self) -> Path:
        """Path of failure.json, whether it exists or not."""
        return self._directory / FAILURE if self._directory else Path(FAILURE)

    def follow(self, leader: Peer) -> None:
        """Write also while `leader`, rank 0 of this run, has the lock of the directory."""
        self._leader = leader

    def put_stale_away(self) -> None:
        """Rename the file of an earlier attempt; one process of a run does that.

        Raises:
            WrongCheckpointError: it cannot be renamed, or is no file.
        """
        if self._directory is None or self._stale is None:
            return
        try:
            with suppress(FileNotFoundError):
                require_regular(self.file)
                self._put_away(self._stale)
        except OSError as error:
            raise WrongCheckpointError(
                f"{self.file} of an earlier attempt cannot be renamed ({error.strerror}): move it "
                "away, so that this run can write there why it fails"
            ) from error

    def record(self, failure: Failure) -> bool:
        """Write `failure` unless a cause is there; return whether it was written.

        A directory that cannot be written to, or that another run writes to, is left alone.
        """
        if self._directory is None or not self._may_write(self._directory):
            return False
        with suppress(OSError):
            self._directory.mkdir(parents=True, exist_ok=True)
            made = self._directory / f"{FAILURE}.{failure.host}.{failure.pid}"
            try:
                made.write_text(json.dumps(asdict(failure), indent=1) + "\n", encoding="utf-8")
                if gives_way := self._giving_way(failure):
                    self._put_away(gives_way)
                # A link is made only where nothing is: one of several processes gets it.
                os.link(made, self._directory / FAILURE)
                return True
            finally:
                made.unlink(missing_ok=True)
        return False

    def _may_write(self, directory: Path) -> bool:
        """Whether no other run writes to `directory`, according to its lock."""
        if not (directory / LOCK).exists() or dead_owner(directory):
            return True
        owner, leader = owner_of(directory), self._leader
        if owner is None or leader is None:
            return False
        return (owner.pid, owner.started, owner.numbers) == (
            *(leader.pid, leader.started),
            leader.numbers,
        )

    def exit_code(self) -> ExitCode:
        """Return the exit code of this attempt's cause; ExitCode.FAILED where none can be read."""
        cause = _read(self.file) if self.is_written() else None
        return cause.exit_code if cause else ExitCode.FAILED

    def is_written(self) -> bool:
        """Whether a cause of this attempt is there."""
        return self._identity() not in (None, self._stale)

    def _giving_way(self, failure: Failure) -> Identity | None:
        """Return the file that `failure` replaces, if there is one that it may replace."""
        assert self._directory
        there = self._identity()
        if there is None or there == self._stale:
            return there
        earlier = _read(self._directory / FAILURE)
        return there if earlier and _says_more(failure, earlier) else None

    def _put_away(self, identity: Identity) -> None:
        """Rename the file of that identity to the next failure-N.json."""
        assert self._directory
        moved = self._directory / f"{FAILURE}.old.{socket.gethostname()}.{os.getpid()}"
        with suppress(FileNotFoundError):
            os.rename(self._directory / FAILURE, moved)
            if _identity_of(moved) != identity:
                # Another process was faster: this is its record.
                with suppress(FileExistsError):
                    os.link(moved, self._directory / FAILURE)
                    moved.unlink()
                    return
            _link_next(moved, self._directory)
            moved.unlink()

    def _identity(self) -> Identity | None:
        return _identity_of(self._directory / FAILURE) if self._directory else None


def failures_of(directory: Path) -> list[Failure]:
    """Return the failures of earlier attempts recorded in `directory`, the oldest first."""
    numbered = sorted(_failures_by_rank(directory).items())
    files = [*(file for _, file in numbered), directory / FAILURE]
    return [failure for file in files if (failure := _read(file))]


def _read(file: Path) -> Failure | None:
    """Return the record in `file`; None of one of another program, or just being written."""
    try:
        with open_regular(file) as stream:
            content = json.loads(stream.read())
        # Another version may write more or less; its defaults are not of this process.
        known = {each.name: content[each.name] for each in fields(Failure) if each.name in content}
        failure = Failure(**{"host": "", "pid": 0, "time": "", **known})
        # A code of a newer version counts as a failure.
        code = failure.exit_code if failure.exit_code in {*ExitCode} else ExitCode.FAILED
        return replace(failure, iteration=int(failure.iteration), exit_code=ExitCode(code))
    except (OSError, ValueError, TypeError):
        return None


def _says_more(failure: Failure, earlier: Failure) -> bool:
    """Whether `earlier` is only a consequence of `failure`."""
    if failure.kind == "lost rank" and failure.rank == earlier.rank:
        return False  # that rank had a word before it left
    return _weight(failure) > _weight(earlier)


def _weight(failure: Failure) -> int:
    return {"lost peer": 0, "lost rank": 1}.get(failure.kind, 2)


def _failures_by_rank(directory: Path) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for file in directory.glob("failure-*.json"):
        if number := re.fullmatch(r"failure-(\d+)\.json", file.name):
            found[int(number[1])] = file
    return found


def _link_next(file: Path, directory: Path) -> None:
    number = max(_failures_by_rank(directory), default=0) + 1
    while True:
        try:
            os.link(file, directory / f"failure-{number}.json")
            return
        except FileExistsError:
            number += 1


def _identity_of(file: Path) -> Identity | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
