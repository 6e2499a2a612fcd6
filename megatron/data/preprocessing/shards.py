"""Shards of the input: the unit of restart, of parallelism and of distribution of preprocessing.

Where shards begin and end follows from the input alone, not from workers, ranks or memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path

from megatron.common.errors import DataError
from megatron.data.preprocessing.shard_writer import ShardState
from megatron.data.readers.inputs import Source, cut_source, open_text
from megatron.data.token_files.publish import write_errors_name

_SHARDS = 1024  # of a large input
_SMALLEST_BYTES = 1 << 22
_LARGEST_BYTES = 1 << 26
_OF_ONE_SIZE = 64  # shards of a pipe, before the next are twice as large


@dataclass(frozen=True)
class Shard:
    """Consecutive pieces of the input, or a packed file that is unpacked into further shards.

    Args:
        name: of its directory. Names sort in the order of the input.
        ranges: sources, and the bytes of each in which its lines begin.
        num_bytes: on disk.
        is_packed: `unpack` makes shards of it: it is compressed, a pipe or a JSON array, and large.
        unpacked_from: the packed source; the only range is then its text, in a separate file.
        lines_before: lines of `unpacked_from` before this shard.
        is_last: no further shard of `unpacked_from` follows.
    """

    name: str
    ranges: tuple[tuple[Source, int, int], ...]
    num_bytes: int
    is_packed: bool = False
    unpacked_from: Source | None = None
    lines_before: int = 0
    is_last: bool = True

    @property
    def is_stream(self) -> bool:
        """Whether it is standard input or a pipe, which no other process can open."""
        return self.ranges[0][0].kind == "stream"

    def sources(self) -> list[Source]:
        """Return the pieces of files to read, cut between lines."""
        if self.unpacked_from is not None:
            return [source for source, _, _ in self.ranges]
        return [piece for each in self.ranges for piece in cut_source(*each)]

    def finished_pieces(self, finished: Mapping[str, ShardState]) -> tuple[list[str], bool]:
        """Return the names of its shards that are finished, and whether those are all of it."""
        if not self.is_packed:
            return [self.name] if self.name in finished else [], self.name in finished
        names = [*takewhile(finished.__contains__, map(self.piece_name, count()))]
        return names, bool(names) and finished[names[-1]].is_last

    def piece_name(self, number: int) -> str:
        """Return the name of one of the shards that this packed one is unpacked into."""
        return f"{self.name}-{number:06d}"


def plan_shards(sources: Sequence[Source], shard_bytes: int | None = None) -> list[Shard]:
    """Cut the input into shards.

    Args:
        shard_bytes: bytes on disk of a shard (default: by the size of the input).
    """
    shard_bytes = shard_bytes or default_shard_bytes(sources)
    shards: list[Shard] = []
    ranges: list[tuple[Source, int, int]] = []
    held = 0

    def close() -> None:
        nonlocal ranges, held
        if ranges:
            shards.append(Shard(f"{len(shards):06d}", tuple(ranges), held))
            ranges, held = [], 0

    for source in sources:
        can_be_cut = source.kind == "plain" or source.is_table
        if source.kind == "stream" or (not can_be_cut and source.num_bytes > shard_bytes):
            close()
            full = ((source, 0, source.num_bytes),)
            shards.append(Shard(f"{len(shards):06d}", full, source.num_bytes, is_packed=True))
            continue
        start = 0
        while start < source.num_bytes:
            stop = min(start + shard_bytes - held, source.num_bytes)
            stop = stop if can_be_cut else source.num_bytes
            ranges.append((source, start, stop))
            held += stop - start
            start = stop
            if held >= shard_bytes:
                close()
    close()
    return shards


def default_shard_bytes(sources: Sequence[Source]) -> int:
    """Return how large shards are where nothing else is given."""
    total = sum(source.num_bytes for source in sources)
    return min(max(total // _SHARDS, _SMALLEST_BYTES), _LARGEST_BYTES)


def shards_of_rank(shards: Sequence[Shard], rank: int, num_ranks: int) -> list[Shard]:
    """Return the consecutive shards of one rank; all ranks get about the same number of bytes.

    Raises:
        DataError: an input is a pipe, of which every rank would read a part.
    """
    total = sum(shard.num_bytes for shard in shards)
    found, before = [], 0
    for shard in shards:
        if shard.is_stream and num_ranks > 1:
            raise DataError(
                f"--input {shard.ranges[0][0].path} is a pipe, which cannot be read in several parts; "
                "give files"
            )
        # The last shards may be pipes, of 0 known bytes, after all bytes of the total.
        if min(before * num_ranks // max(total, 1), num_ranks - 1) == rank:
            found.append(shard)
        before += shard.num_bytes
    return found


def unpack(
    shard: Shard,
    folder: Path,
    finished: Mapping[str, ShardState],
    *,
    shard_bytes: int,
    line_bytes: int,
) -> Iterator[Shard]:
    """Unpack a packed shard into shards of plain text, which lie in `folder` until converted.

    Finished shards are only read through, up to the text after them.

    Args:
        finished: of an earlier run, by name.

    Raises:
        DataError: the input cannot be read or is not the same as then, or the disk is full.
    """
    ((source, _, _),) = shard.ranges
    _, are_all_finished = shard.finished_pieces(finished)
    if are_all_finished:
        return
    end = lines = read = number = 0
    with open_text(source, line_bytes) as (pieces, position):
        text = _Text(pieces)
        while number == 0 or not text.is_at_end():
            name, start, lines_before = shard.piece_name(number), end, lines
            num_bytes = shard_bytes
            if not source.num_bytes:
                num_bytes = min(shard_bytes << number // _OF_ONE_SIZE, _LARGEST_BYTES)
            number += 1
            if name in finished:
                end += sum(map(len, text.to_line_end(num_bytes)))
                lines += finished[name].lines
                if end != finished[name].text_end:
                    raise DataError(
                        f"--input {source.path} is shorter than it was when this run was "
                        "interrupted, or holds other lines"
                    )
                read = position() or end
                continue
            path = folder / f"{name}.text"
            with write_errors_name(path), path.open("wb") as file:
                file.seek(start)  # bytes have the same positions as in the text; a hole is before
                for piece in text.to_line_end(num_bytes):
                    file.write(piece)
                    end += len(piece)
                    lines += piece.count(b"\n")
            plain = replace(
                source, path=str(path), kind="plain", num_bytes=end, start=start, end=end
            )
            before, read = read, position() or end
            yield Shard(
                name,
                ((plain, start, end),),
                read - before,
                unpacked_from=source,
                lines_before=lines_before,
                is_last=text.is_at_end(),
            )


class _Text:
    """Text that comes in pieces, taken up to line ends."""

    def __init__(self, pieces: Iterator[bytes]):
        self._pieces = pieces
        self._rest = b""

    def is_at_end(self) -> bool:
        """Whether no text is left."""
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return True
            self._rest = piece
        return False

    def to_line_end(self, num_bytes: int) -> Iterator[bytes]:
        """Yield at least `num_bytes` bytes, up to the end of a line, or all that is left."""
        while not self.is_at_end():
            piece, self._rest = self._rest, b""
            end = piece.find(b"\n", max(num_bytes - 1, 0)) + 1
            if end:
                piece, self._rest = piece[:end], piece[end:]
            yield piece
            if end:
                return
            num_bytes -= len(piece)
