"""JSONL files: lines read one at a time, named when they are bad, published by a rename."""

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Any, BinaryIO

from tqdm import tqdm

from megatron.common.atomic_files import flush, temporary_beside
from megatron.common.errors import ConfigError, DataError, raise_if_any
from megatron.common.remote_files import is_url, open_input, size_of_input, upload, url_problems
from megatron.data.readers.documents import problem_of, shorten_list
from megatron.data.token_files.publish import write_errors_name

Record = dict[str, Any]
TEXT_KEY = "text"
LOG_INTERVAL = 10_000  # lines between two lines of progress, of tools without a flag for it
_EXCERPT_BYTES = 80
_BATCH_LINES = 256
_BATCH_BYTES = 1 << 20


@dataclass(frozen=True)
class Line:
    """One line of a file that is not blank.

    Args:
        number: counted from 1, blank lines included.
        offset: its first byte in the file.
        raw: its bytes, without the end of line.
    """

    path: str
    number: int
    offset: int
    raw: bytes

    @property
    def location(self) -> str:
        """File and number of the line, for a message."""
        return f"{self.path}, line {self.number}"

    @property
    def excerpt(self) -> str:
        """Start of the line, for a message."""
        return self.raw[:_EXCERPT_BYTES].decode("utf-8", "replace")

    def record(self) -> Record:
        """Return the JSON object of the line.

        Raises:
            DataError: the line holds none.
        """
        try:
            record = json.loads(self.raw.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self.location}: {problem_of(self.raw, error)}") from error
        if not isinstance(record, dict):
            raise DataError(f"{self.location}: not a JSON object: {self.excerpt!r}")
        return record

    def text(self, record: Record, key: str) -> str:
        """Return the text under `key` of this line's record.

        Raises:
            DataError: there is none.
        """
        if key not in record:
            raise DataError(f"{self.location}: no key {key!r}; it has {shorten_list(record)}")
        if not isinstance(record[key], str):
            value = json.dumps(record[key])[:_EXCERPT_BYTES]
            raise DataError(f"{self.location}: key {key!r} holds {value}, which is not a text")
        return record[key]


class Progress:
    """Progress on stderr: a bar on a terminal, plain lines elsewhere.

    Args:
        total_bytes: of all that will be read.
        log_interval: lines read between two lines of progress.
    """

    def __init__(self, total_bytes: int, *, log_interval: int = LOG_INTERVAL):
        self._lines = self._bytes = 0
        self._total_bytes = total_bytes
        self._log_interval = log_interval
        self._started_at = time.monotonic()
        # disable=None: tqdm's word for "only on a terminal".
        self._bar = tqdm(total=total_bytes, unit="B", unit_scale=True, disable=None)

    def add(self, num_bytes: int) -> None:
        """Count one more line."""
        self._lines += 1
        self._bytes += num_bytes
        self._bar.update(num_bytes)
        if self._bar.disable and self._lines % self._log_interval == 0:
            elapsed_s = max(time.monotonic() - self._started_at, 1e-9)
            print(
                f"documents: {self._lines} | documents/s: {self._lines / elapsed_s:.0f} | "
                f"MB/s: {self._bytes / elapsed_s / 1e6:.2f} | "
                f"input: {self._bytes / max(self._total_bytes, 1):.1%}",
                file=sys.stderr,
            )

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


def read_lines(paths: Iterable[str], *, log_interval: int = LOG_INTERVAL) -> Iterator[Line]:
    """Yield the lines of the files that are not blank, and show progress.

    Raises:
        DataError: a file cannot be read.
    """
    paths = list(paths)
    progress = Progress(total_bytes(paths), log_interval=log_interval)
    try:
        for path in paths:
            offset = 0
            with read_errors_name(path), open_input(path) as file:
                for number, raw in enumerate(file, start=1):
                    progress.add(len(raw))
                    if not raw.isspace():
                        yield Line(path, number, offset, raw.rstrip(b"\r\n"))
                    offset += len(raw)
    finally:
        progress.close()


def total_bytes(paths: Iterable[str]) -> int:
    """Return the size of all these files.

    Raises:
        DataError: one cannot be read.
    """
    total = 0
    for path in paths:
        with read_errors_name(path):
            total += size_of_input(path)
    return total


def batches(lines: Iterable[Line]) -> Iterator[list[Line]]:
    """Yield the lines in lists, large enough for a worker and small enough for memory."""
    batch: list[Line] = []
    num_bytes = 0
    for line in lines:
        batch.append(line)
        num_bytes += len(line.raw)
        if len(batch) == _BATCH_LINES or num_bytes >= _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def to_bytes(record: Record) -> bytes:
    """Return the JSON of `record`, without an end of line."""
    try:
        return json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair has no UTF-8, but an escape
        return json.dumps(record).encode("ascii")


class Output:
    """An output file that is being written."""

    def __init__(self, path: str | Path, file: BinaryIO):
        self._path = path
        self._file = file
        self.lines = 0

    def write(self, line: bytes) -> None:
        """Add one line."""
        with write_errors_name(self._path):
            self._file.write(line + b"\n")
        self.lines += 1


@contextmanager
def new_files(*paths: str | Path, inputs: Sequence[str] = ()) -> Iterator[list[Output]]:
    """Write files that appear under their names when all of them are whole, after an error none.

    Those at URLs are written to temporary files, then uploaded one after another: if an upload
    fails, the ones before it stay.

    Args:
        inputs: files that are read meanwhile, none of which may be one of `paths`.

    Raises:
        ConfigError: a path is also an input, or something other than a file.
        DataError: a file cannot be written.
    """
    for path in paths:
        _refuse(path, inputs)
    temporaries = [temporary_beside(_beside(path)) for path in paths]
    try:
        with ExitStack() as stack:
            outputs = []
            for path, temporary in zip(paths, temporaries, strict=True):
                with write_errors_name(path):
                    file = stack.enter_context(temporary.open("xb"))
                outputs.append(Output(path, file))
            yield outputs
            for path, output in zip(paths, outputs, strict=True):
                with write_errors_name(path):
                    output._file.close()
        for path, temporary in zip(paths, temporaries, strict=True):
            with write_errors_name(path):
                flush(temporary)
        for path, temporary in zip(paths, temporaries, strict=True):
            with write_errors_name(path):
                upload(temporary, str(path)) if is_url(path) else os.replace(temporary, path)
    finally:
        for temporary in temporaries:
            temporary.unlink(missing_ok=True)


def _beside(path: str | Path) -> Path:
    """Return the local path next to which a file is written first."""
    return Path(gettempdir(), str(path).rpartition("/")[2]) if is_url(path) else Path(path)


def _refuse(output: str | Path, inputs: Sequence[str]) -> None:
    if is_url(output):
        raise_if_any(url_problems("output", str(output)))
        if output in inputs:
            raise ConfigError(f"{output} would be read and replaced; give the output another name")
        return
    target = Path(output)
    if target.exists() and not target.is_file():
        raise ConfigError(f"cannot write {target}: it is there and not a file")
    for path in inputs:
        if target.exists() and os.path.exists(path) and target.samefile(path):
            raise ConfigError(f"{path} would be read and replaced; give the output another name")


@contextmanager
def read_errors_name(path: str | Path) -> Iterator[None]:
    """Turn an error of the file system into a DataError that names `path`.

    Raises:
        DataError: the file is missing or cannot be read.
    """
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
