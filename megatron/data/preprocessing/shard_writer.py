"""Work in progress on disk: what is written so far, and a small file that says how much of it holds.

Files only grow. A run that was killed, at any moment, is taken up where the last commit left it:
what lies behind is cut off.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

from megatron.common.atomic_files import replace_text
from megatron.common.errors import BusyError, DataError
from megatron.data.preprocessing.block_encoder import Encoded
from megatron.data.preprocessing.quality import Tally
from megatron.data.token_files.differences import differences
from megatron.data.token_files.publish import write_errors_name

STATE = "state.json"


@dataclass
class Position:
    """How far a part of the input is done, and what came of it."""

    source: int = 0
    offset: int | None = None  # in the source; None: its start
    lines: int = 0  # of the source, up to here
    documents: int = 0  # that are under some key
    dropped: int = 0  # documents that are under no key, because they have no token
    written: list[int] = field(default_factory=list)  # documents of each key
    empty: list[int] = field(default_factory=list)  # documents without a token under each key
    bad: int = 0
    input_bytes: int = 0  # of text
    file_bytes: int = 0  # of the files, as far as they are read
    tokens: int = 0
    is_done: bool = False
    tallies: list[Tally] = field(default_factory=list)


def key_file(directory: Path, key: int, suffix: str) -> Path:
    """Return the file that holds the tokens, sizes, counts or hashes of a key."""
    return directory / f"{key}.{suffix}"


class Stage:
    """The directory of one part of the input.

    Args:
        directory: made if it is not there; its parent must be.
        fingerprint: everything that the result depends on.
        num_keys: JSON keys.
        resume: go on from what is there; otherwise it is removed.

    Raises:
        DataError: another process works on it, it belongs to other wishes, or it cannot be
            written.
    """

    def __init__(
        self, directory: Path, fingerprint: Mapping[str, Any], num_keys: int, *, resume: bool
    ):
        self.directory = directory
        self.position = Position(
            written=[0] * num_keys,
            empty=[0] * num_keys,
            tallies=[Tally() for _ in range(num_keys)],
        )
        self._fingerprint = json.loads(json.dumps(fingerprint))
        self._closing = ExitStack()
        self._files: dict[str, BinaryIO] = {}
        self._lengths: dict[str, int] = {}  # at the last commit
        with write_errors_name(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._lock()
            state = read_state(directory) if resume else None
            if state is not None:
                self._take_up(state)
            else:  # whatever was written holds from a commit on
                (directory / STATE).unlink(missing_ok=True)
                for path in directory.iterdir():
                    if path.name != "lock":
                        path.unlink()
            if not self.position.is_done:
                for name in self._names(num_keys):
                    self._files[name] = self._closing.enter_context((directory / name).open("ab"))

    def append(self, encoded: Encoded) -> None:
        """Add what became of one block; it holds after the next commit."""
        position = self.position
        if encoded.source != position.source:
            position.source, position.lines = encoded.source, 0
        with write_errors_name(self.directory):
            for k, key in enumerate(encoded.keys):
                self._files[f"{k}.bin"].write(key.tokens.data)
                self._files[f"{k}.sizes"].write(key.sizes.data)
                self._files[f"{k}.hashes"].write(key.hashes.data)
                if key.counts is not None:
                    self._files[f"{k}.counts"].write(key.counts.data)
                position.tallies[k].add(key.tally, position.written[k])
                position.written[k] += key.num_documents
                position.empty[k] += key.num_empty
                position.tokens += key.tokens.size
        position.offset = encoded.end
        position.lines += encoded.num_lines
        position.documents += encoded.num_documents
        position.dropped += encoded.num_dropped
        position.input_bytes += encoded.num_input_bytes

    def append_bad(self, entry: Mapping[str, Any]) -> None:
        """Remember a bad line."""
        self.position.bad += 1
        with write_errors_name(self.directory):
            self._files["bad"].write(json.dumps(entry).encode() + b"\n")

    def commit(self, *, is_done: bool = False) -> None:
        """Make everything appended so far survive whatever happens."""
        self.position.is_done = is_done
        with write_errors_name(self.directory):
            lengths = {}
            for name, file in self._files.items():
                file.flush()
                lengths[name] = file.tell()
                if lengths[name] != self._lengths.get(name, 0):
                    os.fsync(file.fileno())
            self._lengths = lengths
            state = {
                "fingerprint": self._fingerprint,
                "lengths": lengths,
                "position": asdict(self.position),
            }
            write_json(self.directory / STATE, state)

    def close(self) -> None:
        """Let go of the files."""
        with write_errors_name(self.directory):
            self._closing.close()

    def _names(self, num_keys: int) -> list[str]:
        suffixes = ("bin", "sizes", "counts", "hashes")
        return ["bad", *(f"{k}.{suffix}" for k in range(num_keys) for suffix in suffixes)]

    def _lock(self) -> None:
        lock = self._closing.enter_context((self.directory / "lock").open("wb"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BusyError(
                f"another process writes to {self.directory}; wait for its end or give another "
                "--output-prefix"
            ) from error

    def _take_up(self, state: Mapping[str, Any]) -> None:
        if found := differences(state["fingerprint"], self._fingerprint):
            raise DataError(
                f"cannot --resume from {self.directory}: {'; '.join(found)}; "
                "run as before, or without --resume to begin again"
            )
        for name, length in state["lengths"].items():
            path = self.directory / name
            if not path.exists() or path.stat().st_size < length:
                raise DataError(
                    f"cannot --resume: {path} is shorter than {length} bytes; "
                    "run without --resume to begin again"
                )
            os.truncate(path, length)
        self._lengths = state["lengths"]
        self.position = position_of(state)


def part_directory(root: Path, part: int, num_parts: int) -> Path:
    """Return the stage of a part."""
    return root / f"{part:05d}-of-{num_parts:05d}"


def require_as_many_parts(root: Path, num_parts: int) -> None:
    """Check that there is nothing to resume, or that it is of as many parts.

    Raises:
        DataError: all work that is there is of another number of parts.
    """
    counts = {int(path.parent.name.rpartition("-of-")[2]) for path in root.glob(f"*-of-*/{STATE}")}
    if counts and num_parts not in counts:
        before = " or ".join(map(str, sorted(counts)))
        raise DataError(
            f"cannot --resume from {root}: the work there is one of {before} parts, not of "
            f"{num_parts}; give as many as then (--partitions, --num-shards, or ranks), or run "
            "without --resume to begin again"
        )


def read_state(directory: Path) -> dict[str, Any] | None:
    """Return what was committed last in a stage; None if nothing was."""
    path = directory / STATE
    return json.loads(path.read_text()) if path.exists() else None


def position_of(state: Mapping[str, Any]) -> Position:
    """Return the position that a state says."""
    known = {each.name for each in fields(Position)}
    said = {name: value for name, value in state["position"].items() if name in known}
    return Position(**{**said, "tallies": [Tally.from_json(one) for one in said["tallies"]]})


def write_json(path: Path, value: object) -> None:
    """Write `path` whole, or not at all."""
    text = json.dumps(value, indent=1) + "\n"
    replace_text(path, text, has_one_writer=True, is_flushed=True)


def remove_stage(directories: Sequence[Path]) -> None:
    """Remove stages with all they hold; what says how much of it holds goes first."""
    for directory in directories:
        with suppress(OSError):
            (directory / STATE).unlink()
        shutil.rmtree(directory, ignore_errors=True)
