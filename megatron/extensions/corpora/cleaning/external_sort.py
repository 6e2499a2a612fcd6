"""External sort: records larger than memory, as sorted runs on disk and their merge."""

import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron.common.atomic_files import replacing
from megatron.data.token_files.publish import write_errors_name
from megatron.extensions.corpora.cleaning.records import read_errors_name

RUN_RECORDS = 1 << 20
BLOCK_RECORDS = 1 << 12


@dataclass
class SortedRun:
    """Sorted records in a part of a file, read a block at a time.

    Args:
        start: index of the first record in the file.
        stop: index after the last record.
    """

    file: BinaryIO
    dtype: np.dtype
    start: int
    stop: int

    def read(self, count: int) -> NDArray:
        """Return the next records, `count` at most."""
        count = min(count, self.stop - self.start)
        self.file.seek(self.start * self.dtype.itemsize)
        self.start += count
        return np.frombuffer(self.file.read(count * self.dtype.itemsize), self.dtype)

    def between(self, low: int, high: int) -> "SortedRun":
        """Return the run of the records whose first field is at least `low` and below `high`."""

        def first_field(index: int) -> int:
            (record,) = SortedRun(self.file, self.dtype, index, index + 1).read(1)
            return int(record[0])

        indices = range(self.start, self.stop)
        ends = (bisect_left(indices, value, key=first_field) for value in (low, high))
        return SortedRun(self.file, self.dtype, *(self.start + end for end in ends))


class ExternalSorter:
    """Sorts records by all their fields, in memory for one run and one block of each run.

    Args:
        scratch: an empty file for the runs.
        run_records: records that are sorted in memory.
        block_records: records of each run that a merge holds.
    """

    def __init__(
        self,
        scratch: BinaryIO,
        dtype: np.dtype,
        *,
        run_records: int = RUN_RECORDS,
        block_records: int = BLOCK_RECORDS,
    ):
        self._file, self._dtype, self._run_records = scratch, dtype, run_records
        self._block_records = block_records
        self._held: list[NDArray] = []
        self._num_held = 0
        self._ends = [0]

    def add(self, records: NDArray) -> None:
        """Add records in any order."""
        while len(records):
            taken = records[: self._run_records - self._num_held]
            self._held.append(taken)
            self._num_held += len(taken)
            if self._num_held == self._run_records:
                self._write_run()
            records = records[len(taken) :]

    def blocks(self) -> Iterator[NDArray]:
        """Yield all records in sorted order."""
        self._write_run()
        self._file.flush()
        runs = [
            SortedRun(self._file, self._dtype, start, stop)
            for start, stop in zip(self._ends[:-1], self._ends[1:], strict=True)
        ]
        return merged_blocks(runs, block_records=self._block_records)

    def _write_run(self) -> None:
        if self._num_held:
            self._file.write(sort_records(np.concatenate(self._held)).tobytes())
            self._ends.append(self._ends[-1] + self._num_held)
            self._held, self._num_held = [], 0


def sort_records(records: NDArray) -> NDArray:
    """Return `records` sorted by all fields, the first one first."""
    return records[np.lexsort([records[name] for name in reversed(_fields(records))])]


def merged_blocks(
    runs: Iterable[SortedRun], *, block_records: int = BLOCK_RECORDS
) -> Iterator[NDArray]:
    """Yield the records of all runs in sorted order, in memory for one block of each run."""
    sources = list(runs)
    blocks = [run.read(block_records) for run in sources]
    while True:
        left = [i for i, block in enumerate(blocks) if len(block)]
        if not left:
            return
        # Unread records of a run are not before the last one of its block.
        lasts = [blocks[i][-1:] for i in left if sources[i].start < sources[i].stop]
        bound = sort_records(np.concatenate(lasts))[0] if lasts else None
        taken = []
        for i in left:
            count = len(blocks[i]) if bound is None else _count_up_to(blocks[i], bound)
            taken.append(blocks[i][:count])
            blocks[i] = blocks[i][count:]
            if not len(blocks[i]):
                blocks[i] = sources[i].read(block_records)
        yield sort_records(np.concatenate(taken))


def unique_blocks(blocks: Iterable[NDArray]) -> Iterator[NDArray]:
    """Yield sorted records without those that are equal to the one before."""
    last: NDArray | None = None
    for block in blocks:
        before = np.concatenate([block[:1] if last is None else last, block[:-1]])
        is_new = before != block
        is_new[0] |= last is None
        last = block[-1:]
        if is_new.any():
            yield block[is_new]


def with_firsts(blocks: Iterable[NDArray]) -> Iterator[tuple[NDArray, NDArray]]:
    """Yield blocks of sorted records, and for each record the first one with its first field."""
    carried: NDArray | None = None  # the first of the last group, which may go on
    for block in blocks:
        records = block if carried is None else np.concatenate([carried, block])
        is_first = np.append(True, np.diff(records[_fields(records)[0]]) != 0)
        firsts = records[np.maximum.accumulate(np.where(is_first, np.arange(len(records)), 0))]
        yield records[-len(block) :], firsts[-len(block) :]
        carried = firsts[-1:]


@contextmanager
def open_runs(
    paths: Sequence[Path], dtype: np.dtype, low: int = 0, high: int | None = None
) -> Iterator[list[SortedRun]]:
    """Open files of sorted records, each as the run of those whose first field is in a range."""
    with ExitStack() as stack:
        runs = []
        for path in paths:
            with read_errors_name(path):
                file = stack.enter_context(path.open("rb"))
                records = os.fstat(file.fileno()).st_size // dtype.itemsize
            run = SortedRun(file, dtype, 0, records)
            runs.append(run if high is None else run.between(low, high))
        yield runs


def file_blocks(paths: Iterable[Path], dtype: np.dtype) -> Iterator[NDArray]:
    """Yield the records of files one after the other, in blocks."""
    for path in paths:
        with open_runs([path], dtype) as (run,):
            while len(block := run.read(BLOCK_RECORDS)):
                yield block


def write_blocks(path: Path, blocks: Iterable[NDArray]) -> None:
    """Write blocks of records to a file, which appears when it is complete."""
    with write_errors_name(path), replacing(path) as temporary, temporary.open("xb") as file:
        for block in blocks:
            file.write(block.tobytes())


def _count_up_to(block: NDArray, bound: np.void) -> int:
    """Return the number of records of a sorted block that are not after `bound`."""
    low, high = 0, len(block)
    for name in _fields(block):
        column = block[name][low:high]
        low, high = (
            low + np.searchsorted(column, [bound[name]], "left")[0],
            low + np.searchsorted(column, [bound[name]], "right")[0],
        )
    return int(high)


def _fields(records: NDArray) -> Sequence[str]:
    return records.dtype.names or ()
