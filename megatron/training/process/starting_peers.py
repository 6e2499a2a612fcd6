"""Ranks of this host that have started and not met yet: each leaves its process identity in a file.

A rank that dies before the rendezvous has no connection whose end other ranks could see.
"""

import os
import time
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir
from zlib import crc32

from megatron.common.atomic_files import replace_text
from megatron.common.process_identity import pid_namespace
from megatron.training.process.dead_ranks import Peer, Peers, this_process

_APART_S = 10.0
"""Most time between the starts of two ranks of a parent; one that started earlier is of an attempt
before, which the same parent has started."""

_KEPT_S = 24 * 3600.0


class StartingPeers:
    """Ranks that the same parent process has started, by files in the temporary folder of the host.

    Where nothing can be written, or each rank has a different parent, none is found.

    Args:
        run: text that the ranks of one start share, and the ranks of concurrent starts lack.
        folder: private to this user; default: below the temporary folder.
    """

    def __init__(self, rank: int, run: str, folder: Path | None = None):
        self._own = this_process(rank)
        self._folder = folder or Path(gettempdir(), f"megatron-{os.getuid()}")
        key = crc32(f"{pid_namespace()} {run}".encode())
        self._prefix = f"start-{os.getppid()}-{key:08x}-"
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if self._is_private():
                self._remove_old()
                replace_text(self._file(rank), f"{self._own.pid} {self._own.started}")

    def peers(self) -> Peers:
        """Return the ranks that have started, this one included."""
        found = {self._own.rank: self._own}
        for file in self._folder.glob(f"{self._prefix}*") if self._is_private() else ():
            with suppress(OSError, ValueError):
                rank = int(file.name.removeprefix(self._prefix))
                pid, started = file.read_text(encoding="utf-8").split()
                if _seconds(started) > _seconds(self._own.started) - _APART_S:
                    own = self._own
                    found.setdefault(rank, Peer(rank, own.host, int(pid), started, own.numbers))
        return Peers([*found.values()], have_met=False)

    def close(self) -> None:
        """Remove the file of this rank, once the ranks have met."""
        with suppress(OSError):
            self._file(self._own.rank).unlink(missing_ok=True)

    def _file(self, rank: int) -> Path:
        return self._folder / f"{self._prefix}{rank}"

    def _is_private(self) -> bool:
        """Whether no other user writes to the folder: anyone may have made it before."""
        with suppress(OSError):
            status = self._folder.lstat()
            is_own = status.st_uid == os.getuid() and not status.st_mode & 0o022
            return is_own and self._folder.is_dir() and not self._folder.is_symlink()
        return False

    def _remove_old(self) -> None:
        """Remove the files of ranks that died before they met."""
        for file in self._folder.glob("start-*"):
            with suppress(OSError):
                if file.stat().st_mtime < time.time() - _KEPT_S:
                    file.unlink()


def _seconds(started: str) -> float:
    """Return the seconds from boot to the start of a process; see `start_of`."""
    return int(started) / os.sysconf("SC_CLK_TCK")
