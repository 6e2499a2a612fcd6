"""Files of documents as blocks of complete lines or rows: plain, compressed, tables, standard input, URLs.

Finds the ends of lines without parsing them, in memory that does not grow with them.
"""

import glob
import os
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO

from megatron.common import remote_files
from megatron.common.errors import DataError
from megatron.common.remote_files import is_url, open_input, size_of_input, without_secrets
from megatron.data.readers import arrow, parquet
from megatron.data.readers.decompress import UnreadableFormatError, compression_of, decompress
from megatron.data.readers.line_blocks import EXCERPT_BYTES, Limits, whole_lines
from megatron.data.readers.text_formats import (
    DATA_SUFFIXES,
    SUFFIXES,
    TextSeparator,
    documents_of_text,
    is_array,
    is_text_by_name,
    suffix_of,
    unpacked_array,
)

STDIN = "-"
_TABLES: dict[str, Any] = {"parquet": parquet, "arrow": arrow}  # kinds, and their readers
_PIECE_BYTES = 1 << 18
_ARRAY_BYTES = 1 << 12  # of the beginning of a file, after which a JSON array has begun
_MOST_ROWS = 1 << 16  # of a block, however little they hold


@dataclass(frozen=True)
class Source:
    """An input, or the part of it from `start` to `end`: bytes of a plain file, rows of a table."""

    path: str
    kind: (
        str  # "plain", "stream", "parquet", "arrow", a compression, or "whole" if it cannot be cut
    )
    num_bytes: int  # of this part on disk; 0: unknown
    start: int = 0
    end: int | None = None
    text: TextSeparator | None = None  # separator of documents in plain text; None: JSON

    @property
    def is_table(self) -> bool:
        """Whether documents are rows."""
        return self.kind in _TABLES

    @cached_property
    def lines_before(self) -> int:
        """Lines of a plain file before this part; counted once, by reading the file."""
        return count_lines(self.path, self.start) if self.start else 0


@dataclass(frozen=True)
class Block:
    """Consecutive lines of one source.

    Args:
        source: index of the source.
        start: first byte of the lines as text, or first row of a table.
        end: where the next block starts.
        data: the lines; None if whoever needs them reads these bytes of the plain file.
        rows: the lines are rows of an Arrow table, serialised in `data`.
        too_long: the block is one line over the limit, which starts like this.
        too_long_bytes: of that line.
        text: the lines are documents of plain text: as they are, for the separator "line", or
            JSON strings.
    """

    source: int
    path: str
    start: int
    end: int
    data: bytes | None = None
    rows: bool = False
    too_long: bytes | None = None
    too_long_bytes: int = 0
    text: TextSeparator | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of text, or of rows in memory."""
        return len(self.data or b"") if self.rows else self.end - self.start


def find_sources(
    patterns: Iterable[str], text: TextSeparator | None = None, *, by_name: bool = False
) -> list[Source]:
    """Return the inputs that `patterns` name: files, folders, URLs, globs, or `-` for standard input.

    Args:
        text: separator of documents, if the inputs are plain text.
        by_name: tables may be among them, and without `text` JSON and plain text, as the names of
            files say; see `is_text_by_name`.

    Raises:
        DataError: a file is missing or of another format, or nothing matches a glob or is in a folder.
    """
    return [
        _source(path, text, by_name=by_name) for pattern in patterns for path in _matches(pattern)
    ]


def files_in(folder: str) -> tuple[list[str], Counter[str]]:
    """Return the files of documents below a folder, by their suffixes, and the suffixes of the others.

    Hidden files and folders and work in progress do not count. Outputs of preprocessing are no
    documents, and neither is Markdown beside data, which describes them.
    """
    root = Path(folder)
    suffixes = {
        str(path): suffix_of(path.name)
        for path in sorted(root.rglob("*"))
        if path.is_file() and not any(map(_is_hidden, path.relative_to(root).parts))
    }
    known = {*SUFFIXES} - ({".md"} if DATA_SUFFIXES & {*suffixes.values()} else set())
    found = [path for path, suffix in suffixes.items() if suffix in known]
    return found, Counter(suffix for suffix in suffixes.values() if suffix not in known)


def cut_source(source: Source, low: int, high: int) -> Iterator[Source]:
    """Yield the part of `source` that begins in its bytes `low` to `high`, cut between lines.

    Parts of consecutive ranges are the source: a table is cut between its row groups, and
    an uncuttable piece belongs to the range that holds its first byte.
    """
    if source.kind == "plain":
        yield from _plain_part(source, low, high)
    elif source.is_table:
        yield from _table_part(source, low, high)
    elif low <= 0 < high:
        yield source


def read_blocks(
    sources: Sequence[Source], limits: Limits, *, columns: Sequence[str] | None = None
) -> Iterator[Block]:
    """Yield the blocks of all sources in order.

    Args:
        columns: the only columns of tables to read.

    Raises:
        DataError: an input cannot be read, or is damaged.
    """
    for index, source in enumerate(sources):
        with _read_errors_name(source.path):
            if source.is_table:
                yield from _table_blocks(index, source, limits, columns)
            elif source.kind == "plain" and limits.block_lines is None:
                yield from _plain_blocks(index, source, limits)
            else:
                yield from _stream_blocks(index, source, limits)


@contextmanager
def open_text(
    source: Source, line_bytes: int
) -> Iterator[tuple[Iterator[bytes], Callable[[], int]]]:
    """Yield the text of a source that is not plain, decompressed, and how much of its file was read.

    Args:
        line_bytes: the longest element of a JSON array.

    Raises:
        DataError: the input cannot be read, or is damaged.
    """
    with _open(source) as file:
        pieces = _lines_only(decompress(file), source.path)
        if source.text is None:
            pieces = unpacked_array(pieces, line_bytes)
        elif source.text != "line":
            pieces = documents_of_text(pieces, source.text)
        is_file = file.seekable()
        yield _name_errors(pieces, source.path), lambda: file.tell() if is_file else 0


def columns_of_tables(sources: Iterable[Source]) -> Iterator[tuple[str, list[str]]]:
    """Yield the path and the names of the columns of each source that is a table."""
    for source in sources:
        if source.is_table:
            with _read_errors_name(source.path):
                yield source.path, _TABLES[source.kind].column_names(source.path)


def read_range(path: str, start: int, end: int) -> bytes:
    """Return these bytes of a plain file.

    Raises:
        DataError: the file cannot be read, or has become shorter.
    """
    if is_url(path):
        with _read_errors_name(path):
            return remote_files.read_range(path, start, end - start)
    with _read_errors_name(path), Path(path).open("rb", buffering=0) as file:
        file.seek(start)
        data = file.read(end - start)
        while data is not None and len(data) < end - start:
            more = file.read(end - start - len(data))
            if not more:
                raise DataError(f"--input {path} changed while being read: it ends before {end}")
            data += more
    return data


def count_lines(path: str, end: int) -> int:
    """Return the number of lines that end before byte `end` of a plain file."""
    with _read_errors_name(path), open_input(path) as file:
        lines = 0
        while end > 0 and (piece := file.read(min(end, _PIECE_BYTES))):
            lines += piece.count(b"\n")
            end -= len(piece)
    return lines


def _matches(pattern: str) -> list[str]:
    if os.path.isdir(pattern):
        found, _ = files_in(pattern)
        if not found:
            raise DataError(
                f"the folder --input {pattern} has no file that ends in {', '.join(SUFFIXES)}, also "
                "compressed; name its files"
            )
        return found
    if pattern == STDIN or os.path.exists(pattern) or not glob.has_magic(pattern):
        return [pattern]
    with _read_errors_name(pattern):
        find = remote_files.glob_urls if is_url(pattern) else partial(glob.glob, recursive=True)
        found = sorted(find(pattern))
    if not found:
        raise DataError(f"no file matches --input {pattern}")
    return found


def _is_hidden(part: str) -> bool:
    return part.startswith(".") or part.endswith(".stage")


def _source(path: str, text: TextSeparator | None, *, by_name: bool) -> Source:
    if path == STDIN:
        return Source(path, "stream", 0, text=text)
    with _read_errors_name(path):
        if not is_url(path):
            mode = os.stat(path).st_mode
            if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
                return Source(path, "stream", 0, text=text)
        num_bytes = size_of_input(path)
        with open_input(path, _ARRAY_BYTES) as file:
            begin = file.read(_ARRAY_BYTES)
        kind = _table_kind(begin) or compression_of(begin)
        if by_name and kind in _TABLES:
            text = None
        elif by_name and text is None:
            text = _separator_by_name(path, begin, kind)
    if kind in _TABLES and text:
        raise DataError(f"--input {path} is {kind.title()}; leave --input-format text out")
    if kind is None and (is_array(begin) if text is None else text != "line"):
        kind = "whole"
    if kind is not None:
        return Source(path, kind, num_bytes, text=text)
    return Source(path, "plain", num_bytes, 0, num_bytes, text)


def _separator_by_name(path: str, begin: bytes, compression: str | None) -> TextSeparator | None:
    if compression:
        with open_input(path) as file:
            begin = next(decompress(file), b"")[:_ARRAY_BYTES]
    return "line" if is_text_by_name(path, begin) else None


def _table_kind(begin: bytes) -> str | None:
    """Return the kind of a table that begins with these bytes; None for anything else."""
    if begin.startswith(parquet.MAGIC):
        return "parquet"
    return "arrow" if begin.startswith(arrow.MAGICS) else None


def _plain_part(source: Source, low: int, high: int) -> Iterator[Source]:
    low, high = max(low, 0), min(high, source.num_bytes)
    if low >= high:
        return
    with _read_errors_name(source.path), open_input(source.path, _PIECE_BYTES) as file:
        start = _line_end(file, low - 1, source.num_bytes) if low else 0
        end = _line_end(file, high - 1, source.num_bytes)
    if start < end:
        yield replace(source, num_bytes=end - start, start=start, end=end)


def _table_part(source: Source, low: int, high: int) -> Iterator[Source]:
    with _read_errors_name(source.path):
        rows = _TABLES[source.kind].row_group_starts(source.path)
    groups = len(rows) - 1
    mine = [i for i in range(groups) if low <= source.num_bytes * i // groups < high]
    if mine:
        share = source.num_bytes * len(mine) // groups
        yield replace(source, num_bytes=share, start=rows[mine[0]], end=rows[mine[-1] + 1])


def _line_end(file: BinaryIO, position: int, end: int) -> int:
    """Return the end of the line that holds byte `position`, or `end`."""
    file.seek(position)
    while position < end and (piece := file.read(1 << 14)):
        newline = piece.find(b"\n")
        if newline >= 0:
            return min(position + newline + 1, end)
        position += len(piece)
    return end


def _plain_blocks(index: int, source: Source, limits: Limits) -> Iterator[Block]:
    start = source.start
    end = source.num_bytes if source.end is None else source.end
    with open_input(source.path, _PIECE_BYTES) as file:
        while start < end:
            target = min(start + limits.block_bytes, end)
            stop = _line_end(file, target - 1, end)
            if stop - start > limits.line_bytes:
                file.seek(start)
                before = start + file.read(target - start).rfind(b"\n") + 1
                if before > start:
                    stop = before
                else:
                    excerpt = read_range(source.path, start, start + EXCERPT_BYTES)
                    where = (index, source.path, start, stop)
                    yield Block(*where, too_long=excerpt, too_long_bytes=stop - start)
                    start = stop
                    continue
            yield Block(index, source.path, start, stop, text=source.text)
            start = stop


def _stream_blocks(index: int, source: Source, limits: Limits) -> Iterator[Block]:
    start = source.start
    if source.kind == "plain":
        with open_input(source.path) as file:
            file.seek(start)
            stop = source.num_bytes if source.end is None else source.end
            yield from _blocks_of(_pieces(file, stop - start), index, source, limits)
    else:
        with open_text(source, limits.line_bytes) as (pieces, _):
            yield from _blocks_of(pieces, index, source, limits)


def _blocks_of(
    pieces: Iterator[bytes], index: int, source: Source, limits: Limits
) -> Iterator[Block]:
    start = source.start
    for data, too_long, length in whole_lines(pieces, limits):
        where = (index, source.path, start, start + length)
        if too_long:
            yield Block(*where, too_long=data, too_long_bytes=length)
        else:
            yield Block(*where, data=data, text=source.text)
        start += length


@contextmanager
def _open(source: Source) -> Iterator[BinaryIO]:
    if source.path == STDIN:
        yield sys.stdin.buffer
        return
    with _read_errors_name(source.path):
        file = open_input(source.path)
    with file:
        yield file


def _name_errors(pieces: Iterator[bytes], path: str) -> Iterator[bytes]:
    """Yield `pieces`; an error of reading them names the file."""
    with _read_errors_name(path):
        yield from pieces


def _lines_only(pieces: Iterator[bytes], path: str) -> Iterator[bytes]:
    """Yield `pieces`, which must not belong to a table: a table needs a separate file."""
    for number, piece in enumerate(pieces):
        if number == 0 and (kind := _table_kind(piece)):
            raise DataError(
                f"--input {path} is {kind.title()} in a pipe or in a compressed file, and is read from "
                "both of its ends; write it to a file, and give that"
            )
        yield piece


def _pieces(file: BinaryIO, count: int) -> Iterator[bytes]:
    while count > 0 and (piece := file.read(min(count, _PIECE_BYTES))):
        yield piece
        count -= len(piece)


def _table_blocks(
    index: int, source: Source, limits: Limits, columns: Sequence[str] | None
) -> Iterator[Block]:
    start = source.start
    for rows in _TABLES[source.kind].read_rows(
        source.path,
        start,
        source.end,
        columns,
        most_bytes=limits.block_bytes,
        most_rows=limits.block_lines or _MOST_ROWS,
        most_row_bytes=limits.line_bytes,
    ):
        end = start + rows.num_rows
        where = (index, source.path, start, end)
        if rows.is_too_long:
            yield Block(*where, rows=True, too_long=rows.data, too_long_bytes=rows.num_bytes)
        else:
            yield Block(*where, data=rows.data, rows=True)
        start = end


@contextmanager
def _read_errors_name(path: str) -> Iterator[None]:
    path = without_secrets(path)
    try:
        yield
    except UnreadableFormatError as error:
        raise DataError(f"--input {path} is {error}") from error
    except OSError as error:
        raise DataError(f"cannot read --input {path}: {error.strerror or error}") from error
    except (EOFError, ValueError) as error:
        raise DataError(f"--input {path} is damaged or not complete: {error}") from error
