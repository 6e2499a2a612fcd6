"""Blocks: files START-END.hdf5 of a table, each computed by one rank, skipped by a restart.

A block appears by an atomic rename, so that one which is there is complete. Which rank computes it
does not change its content.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.common.errors import DataError
from megatron.data.token_files.publish import write_errors_name
from megatron.extensions.retro.retrieval.hdf5_files import read_array, write_arrays

log = logging.getLogger(__name__)

_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.05, 5.0
_SILENCE_S = 10.0
"""How long a rank waits before it logs the cause."""

Arrays = Mapping[str, NDArray]
"""Arrays of a block by key."""

Compute = Callable[[range], Arrays]
"""Computes the arrays of the rows of a block."""


@dataclass(frozen=True)
class Ranks:
    """The processes that share the blocks, and how long one waits for other processes' files.

    Args:
        num_cores: this process's share of the CPU cores.
        timeout_s: without a change.
    """

    rank: int = 0
    size: int = 1
    num_cores: int = 1
    timeout_s: float = 36_000.0

    @property
    def is_first(self) -> bool:
        """Whether this process joins the blocks of all."""
        return self.rank == 0

    def wait(self, waits_for: Callable[[], str]) -> None:
        """Wait until `waits_for()` is empty.

        Communication: with the other ranks, through files.

        Raises:
            DataError: it does not change within the timeout.
        """
        last, changed_at, poll_s = "", time.monotonic(), _SHORTEST_POLL_S
        is_logged = False
        while waiting := waits_for():
            if waiting != last:
                last, changed_at, poll_s = waiting, time.monotonic(), _SHORTEST_POLL_S
            if time.monotonic() - changed_at > self.timeout_s:
                raise DataError(
                    f"rank {self.rank} waits for {waiting}, and nothing has changed for "
                    f"{self.timeout_s:.0f} s (--retro-timeout-s): see the messages of the other "
                    "ranks, and run the same command again"
                )
            if not is_logged and time.monotonic() - changed_at > _SILENCE_S:
                is_logged = True
                log.info("rank %d of %d waits for %s", self.rank, self.size, waiting)
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)


class Blocks:
    """The blocks of a table of `num_rows` rows in one folder.

    Args:
        size: rows of a block; the last one has fewer.
        is_valid: whether the arrays in the file of a block belong to its rows.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_rows: int,
        size: int,
        keys: tuple[str, ...],
        is_valid: Callable[[range, Arrays], bool],
    ):
        self.folder, self._keys, self._is_valid = folder, keys, is_valid
        self.ranges = [
            range(start, min(start + size, num_rows)) for start in range(0, num_rows, size)
        ]
        self._digits = int(np.ceil(np.log10(max(num_rows, 1)))) + 1
        self._known: set[range] = set()

    def file(self, rows: range) -> Path:
        """Return the path of the block of these rows."""
        digits = self._digits
        return self.folder / f"{rows.start:0{digits}}-{rows.stop:0{digits}}.hdf5"

    def read(self, rows: range) -> Arrays:
        """Return the arrays of a block.

        Raises:
            DataError: it is missing or damaged.
        """
        return {key: read_array(self.file(rows), key, kinds="iuf") for key in self._keys}

    def __iter__(self) -> Iterator[Arrays]:
        """Yield the arrays of each block, in order."""
        return map(self.read, self.ranges)

    def missing(self) -> str:
        """Return how many blocks are missing or damaged; empty if none is."""
        count = sum(not self._is_there(rows) for rows in self.ranges)
        return f"{count} of {len(self.ranges)} blocks in {self.folder}" if count else ""

    def fill(self, compute: Compute, ranks: Ranks) -> None:
        """Compute this rank's blocks, but for those that are there; the first rank waits for all.

        Other ranks do not, as the first one may delete blocks once it has joined them.

        Raises:
            DataError: a file cannot be written, or the blocks of another rank do not appear.

        Communication: with the other ranks, through files.
        """
        with write_errors_name(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        for rows in self.ranges[ranks.rank :: ranks.size]:
            if self._is_there(rows):
                continue
            file = self.file(rows)
            if file.exists():
                log.warning("%s is damaged: it is computed again", file)
            write_arrays(file, compute(rows))
            log.info("%s: rows %d to %d are done", self.folder, rows.start, rows.stop)
        if ranks.is_first:
            ranks.wait(self.missing)

    def validate(self, compute: Compute, ranks: Ranks, *, fraction: float) -> str:
        """Compute a random fraction of this rank's blocks again; return a line about them.

        Randomness: seeded by the system, so that another run takes other blocks.

        Raises:
            DataError: a block is missing, damaged or has other content.
        """
        if not self.folder.exists():
            raise DataError(
                f"there is no {self.folder}: run the task with the same settings before it is "
                "validated"
            )
        ranges = self.ranges[ranks.rank :: ranks.size]
        count = int(np.ceil(fraction * len(ranges)))
        chosen = sorted(np.random.default_rng().permutation(len(ranges))[:count].tolist())
        for rows in (ranges[number] for number in chosen):
            found, expected = self.read(rows), compute(rows)
            for key in self._keys:
                if not _is_same(found[key], expected[key]):
                    raise DataError(
                        f"{self.file(rows)}: {key} is not what it is when computed again: the file "
                        "is damaged, or was made from other data or settings; delete it and run "
                        "the task again"
                    )
        return f"{self.folder}: {count} of {len(ranges)} blocks are valid"

    def _is_there(self, rows: range) -> bool:
        if rows not in self._known and self.file(rows).exists():
            try:
                if self._is_valid(rows, self.read(rows)):
                    self._known.add(rows)
            except DataError as error:
                log.debug("%s", error)
        return rows in self._known


def table_blocks(
    folder: Path, key: str, *, num_rows: int, size: int, width: int, dtype: type[np.generic]
) -> Blocks:
    """Return the blocks of a table of one array, [num_rows, width]."""

    def is_valid(rows: range, arrays: Arrays) -> bool:
        array = arrays[key]
        return array.shape == (len(rows), width) and array.dtype == dtype

    return Blocks(folder, num_rows=num_rows, size=size, keys=(key,), is_valid=is_valid)


def _is_same(found: NDArray, expected: NDArray) -> bool:
    return (
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and found.tobytes() == expected.tobytes()
    )
