"""Distributed preprocessing: the ranks of a launch convert their shards, and rank 0 joins all.

Rendezvous and barrier are files next to the output. Files of earlier launches in the same folder
are ignored, whatever run id the launcher uses.
"""

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megatron.common.atomic_files import replace_text
from megatron.common.errors import DataError
from megatron.data.preprocessing.assemble import Written
from megatron.data.preprocessing.preprocess import convert_share, merge_shards
from megatron.data.preprocessing.preprocess_spec import PreprocessSpec
from megatron.data.token_files.publish import write_errors_name

log = logging.getLogger(__name__)

_POLL_S = 0.2
_LOG_EVERY_S = 60.0


def preprocess_on_ranks(
    spec: PreprocessSpec, rank: int, num_ranks: int, *, timeout_s: float, merge_workers: int
) -> list[Written]:
    """Convert the shards of this rank of a launch; rank 0 then joins all, and returns the files.

    Args:
        timeout_s: how long to wait for ranks that show no progress.
        merge_workers: processes of rank 0 that copy.

    Communication: waits for every other rank at the start, and on rank 0 at the end, through files.

    Raises:
        DataError: as `convert_share`, or a rank does not start or makes no progress.
        MegatronError: a process was killed.
    """
    launch = Launch(spec.staging, rank, num_ranks, timeout_s)
    convert_share(spec, rank, num_ranks)
    launch.finish()
    return merge_shards(replace(spec, workers=merge_workers)) if rank == 0 else []


class Launch:
    """The processes of one launch, which find each other and wait for each other through files.

    Rank 0 draws a random name. Another rank replies with that name and a random token; when rank 0
    repeats the token, the name is not from an older launch.

    Communication: waits for every other rank.

    Raises:
        DataError: one does not start within the timeout, or another launch works in this folder.
    """

    def __init__(self, folder: Path, rank: int, num_ranks: int, timeout_s: float):
        self._folder, self._rank, self._num_ranks = folder, rank, num_ranks
        self._timeout_s = timeout_s
        self._token = secrets.token_hex(8)
        self._name = self._token if rank == 0 else ""
        with write_errors_name(folder):
            folder.mkdir(exist_ok=True)
        if rank == 0:
            self._write("launch", self._name)
        self._wait(self._join if rank else self._invite)

    def finish(self) -> None:
        """Report that this rank is done; on rank 0 wait until all are.

        Raises:
            DataError: no rank has begun or finished a shard within the timeout.
        """
        self._write(f"rank-{self._rank}.done", self._name)
        if self._rank == 0:
            self._wait(lambda: self._missing("done", "have not finished"))

    def _invite(self) -> str:
        if self._read("launch") != self._name:
            raise DataError(
                f"another launch works in {self._folder}; wait for its end, or give another "
                "--output-prefix"
            )
        for rank in range(1, self._num_ranks):
            reply = self._read(f"rank-{rank}.here")
            if reply.startswith(f"{self._name} ") and self._read(f"rank-{rank}.met") != reply:
                self._write(f"rank-{rank}.met", reply)
        return self._missing("met", "have not started")

    def _join(self) -> str:
        launch = self._read("launch")
        if launch != self._name:
            self._write(f"rank-{self._rank}.here", f"{launch} {self._token}")
            self._name = launch
        is_met = launch and self._read(f"rank-{self._rank}.met") == f"{launch} {self._token}"
        return "" if is_met else "rank 0 has not started"

    def _missing(self, file: str, what: str) -> str:
        """Return which ranks have not written a file in this launch; empty if all have."""
        others = range(1, self._num_ranks)
        missing = [r for r in others if self._read(f"rank-{r}.{file}").split()[:1] != [self._name]]
        names = ", ".join(map(str, missing))
        return f"ranks {names} of {self._num_ranks} {what}" if missing else ""

    def _wait(self, waits_for: Callable[[], str]) -> None:
        """Wait until `waits_for()` is empty; the timeout counts from the last sign of progress."""
        logged_at = changed_at = time.monotonic()
        last: object = None
        while waiting := waits_for():
            # A shard that is begun has a new folder in this one.
            now = (waiting, self._folder.stat().st_mtime_ns)
            if now != last:
                last, changed_at = now, time.monotonic()
            if time.monotonic() - changed_at > self._timeout_s:
                raise DataError(
                    f"{waiting}, and no shard was begun for {self._timeout_s} s (--timeout-s); "
                    "see the messages of these ranks, and run again with --resume"
                )
            if time.monotonic() - logged_at > _LOG_EVERY_S:
                logged_at = time.monotonic()
                log.info("waiting: %s", waiting)
            time.sleep(_POLL_S)

    def _write(self, name: str, text: str) -> None:
        with write_errors_name(self._folder / name):
            replace_text(self._folder / name, text)

    def _read(self, name: str) -> str:
        try:
            return (self._folder / name).read_text(encoding="utf-8")
        except OSError:
            return ""
