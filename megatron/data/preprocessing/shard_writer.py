"""Shard writer: converts one input shard into separate token files, then writes a marker.

A shard without the marker, or whose files differ from it, is converted again. So nothing waits for
the disk: the marker has a digest of each file, which detects a loss by a power failure.
"""

import fcntl
import hashlib
import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from xxhash import xxh3_128

from megatron.common.atomic_files import replace_text
from megatron.common.errors import BusyError, DataError
from megatron.data.preprocessing.block_encoder import Encoded
from megatron.data.preprocessing.quality import Tally
from megatron.data.token_files.disk_file import file_digest
from megatron.data.token_files.publish import write_errors_name

log = logging.getLogger(__name__)

FINISHED = "finished.json"


@dataclass
class ShardState:
    """Counts of a shard, and digests of its files: the content of its marker."""

    options: str = ""  # digest of the options and inputs
    lines: int = 0
    documents: int = 0  # under at least one key
    dropped: int = 0  # documents under no key, because they have no token
    unselected: int = 0  # documents that --where leaves out
    written: list[int] = field(default_factory=list)  # documents of each key
    empty: list[int] = field(default_factory=list)  # documents without a token under each key
    bad: int = 0
    input_bytes: int = 0  # of text
    file_bytes: int = 0
    tokens: int = 0
    lengths: dict[str, int] = field(default_factory=dict)  # bytes of each file
    digests: dict[str, str] = field(default_factory=dict)  # XXH3 of each file
    tallies: list[Tally] = field(default_factory=list)
    text_end: int = 0  # of a shard of unpacked text: its end in the text
    is_last: bool = True


def new_state(num_keys: int) -> ShardState:
    """Return the state of no document."""
    return ShardState(
        written=[0] * num_keys,
        empty=[0] * num_keys,
        tallies=[Tally() for _ in range(num_keys)],
    )


def existing_files(folders: Iterable[Path], key: int, suffix: str) -> list[Path]:
    """Return the files with the tokens, sizes, counts or hashes of a key, of shards that have any."""
    return [path for folder in folders if (path := folder / f"{key}.{suffix}").exists()]


class ShardWriter:
    """The token files of one shard while it is converted.

    Raises:
        BusyError: another process writes the same shard.
        DataError: the disk is full, or the folder cannot be written.
    """

    def __init__(self, folder: Path, options: str, num_keys: int):
        self.folder = folder
        self.state = new_state(num_keys)
        self.state.options = options
        self._files: dict[str, BinaryIO] = {}
        self._digests: dict[str, xxh3_128] = {}
        self._closing = ExitStack()
        with write_errors_name(folder):
            folder.mkdir(exist_ok=True)
            lock = self._closing.enter_context((folder / "lock").open("wb"))
            _flock(lock, folder, fcntl.LOCK_EX)
            (folder / FINISHED).unlink(missing_ok=True)

    def append(self, encoded: Encoded) -> None:
        """Add the tokens of one block."""
        state = self.state
        with write_errors_name(self.folder):
            for k, key in enumerate(encoded.keys):
                self._write(f"{k}.bin", key.tokens.data)
                self._write(f"{k}.sizes", key.sizes.data)
                self._write(f"{k}.hashes", key.hashes.data)
                if key.counts is not None:
                    self._write(f"{k}.counts", key.counts.data)
                state.tallies[k].add(key.tally, state.written[k])
                state.written[k] += key.num_documents
                state.empty[k] += key.num_empty
                state.tokens += key.tokens.size
        state.lines += encoded.num_lines
        state.documents += encoded.num_documents
        state.dropped += encoded.num_dropped
        state.unselected += encoded.num_unselected
        state.input_bytes += encoded.num_input_bytes

    def append_bad(self, entry: Mapping[str, Any]) -> None:
        """Add a bad line."""
        self.state.bad += 1
        with write_errors_name(self.folder):
            self._write("bad", json.dumps(entry).encode() + b"\n")

    def finish(self) -> None:
        """Close all files, then write the marker."""
        with write_errors_name(self.folder):
            for name, file in self._files.items():
                self.state.lengths[name] = file.tell()
                self.state.digests[name] = self._digests[name].hexdigest()
                file.close()
            # Not indented, and not by asdict: that takes milliseconds of the 40 of a small shard.
            marker = json.dumps(self.state, default=vars)
            replace_text(self.folder / FINISHED, marker, has_one_writer=True)
            self._closing.close()

    def close(self) -> None:
        """Close the files; without `finish` they count for nothing."""
        with suppress(OSError):  # closing flushes buffers, and the disk may be full
            self._closing.close()

    def _write(self, name: str, content: memoryview | bytes) -> None:
        if name not in self._files:
            file = (self.folder / name).open("wb")
            self._files[name] = self._closing.enter_context(file)
            self._digests[name] = xxh3_128()
        self._files[name].write(content)
        self._digests[name].update(content)


def finished_shards(staging: Path) -> dict[str, ShardState]:
    """Return the shards with a marker and files of its lengths, by name; log the other shards."""
    found = {}
    for marker in sorted(staging.glob(f"*/{FINISHED}")):
        with _log_errors(marker.parent):
            state = _read_marker(marker)
            _require_lengths(marker.parent, state)
            found[marker.parent.name] = state
    return found


def intact_shards(staging: Path, finished: Mapping[str, ShardState]) -> dict[str, ShardState]:
    """Return the finished shards whose files have the marker's digests; log the other shards."""
    found = {}
    for name, state in finished.items():
        with _log_errors(staging / name):
            _require_digests(staging / name, state)
            found[name] = state
    return found


@contextmanager
def _log_errors(folder: Path) -> Iterator[None]:
    """Log a shard's problem; the shard then counts as not finished."""
    try:
        yield
    except DataError as error:
        log.warning("%s counts as not finished: %s", folder, error)


def _read_marker(marker: Path) -> ShardState:
    """Return the content of the marker of a finished shard.

    Raises:
        DataError: it is damaged.
    """
    try:
        state = json.loads(marker.read_text(encoding="utf-8"))
        tallies = [Tally.from_json(one) for one in state["tallies"]]
        return ShardState(**{**state, "tallies": tallies})
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{marker.name} is damaged ({error})") from error


def _require_lengths(folder: Path, state: ShardState) -> None:
    """Check that the files of a finished shard are as long as when they were written.

    Tokens may be missing: they are removed once joined with the other shards' tokens.

    Raises:
        DataError: a file was cut or is missing.
    """
    for name, length in state.lengths.items():
        try:
            found = (folder / name).stat().st_size
        except FileNotFoundError as error:
            if not name.endswith(".bin"):
                raise DataError(f"{name} is missing") from error
        else:
            if found != length:
                raise DataError(f"{name} has {found} bytes instead of {length}")


def _require_digests(folder: Path, state: ShardState) -> None:
    """Check the content of the files that are left; an earlier version recorded no digests.

    Raises:
        DataError: a file differs from the written one, or cannot be read.
    """
    for name, digest in state.digests.items():
        path = folder / name
        if path.exists() and file_digest(path) != digest:
            raise DataError(f"{name} is not what was written")


def remove_folders(folders: Iterable[Path]) -> None:
    """Remove shards, or all of the work in progress; of a shard the marker goes first."""
    for folder in folders:
        with suppress(OSError):
            (folder / FINISHED).unlink()
        shutil.rmtree(folder, ignore_errors=True)


def write_json(path: Path, value: object) -> None:
    """Write `path` atomically, on the disk."""
    text = json.dumps(value, indent=1) + "\n"
    replace_text(path, text, has_one_writer=True, is_flushed=True)


def record_options(staging: Path, options: Mapping[str, Any]) -> str:
    """Write options and inputs to a file named by their digest, and return the digest."""
    text = json.dumps(options, indent=1) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    with write_errors_name(staging):
        replace_text(staging / f"options-{digest}.json", text, is_flushed=True)
    return digest


def read_options(staging: Path, digest: str) -> dict[str, Any]:
    """Return the options that `record_options` wrote; empty if they are lost.

    Raises:
        DataError: the file is damaged.
    """
    path = staging / f"options-{digest}.json"
    try:
        options: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}); convert again without --resume") from error
    return options


@contextmanager
def staging_lock(staging: Path, kind: int) -> Iterator[None]:
    """Hold the lock of the work in progress: `LOCK_EX`, or `LOCK_SH` for one rank of several.

    Raises:
        BusyError: another process holds it.
    """
    with (staging / "lock").open("wb") as lock:
        _flock(lock, staging, kind)
        yield


def _flock(lock: BinaryIO, folder: Path, kind: int) -> None:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BusyError(
            f"another process writes to {folder}; wait for its end, or give another --output-prefix"
        ) from error
