"""Resumable output of JSON lines: FILE.partial, which a later attempt continues, until FILE is complete."""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from megatron.common.errors import BusyError, ConfigError
from megatron.common.remote_files import is_url, without_secrets
from megatron.data.token_files.publish import write_errors_name
from megatron.extensions.corpora.cleaning.records import Record, new_files, read_errors_name

SUFFIX = ".partial"


class ResumableOutput:
    """Lines of an output file, written by this attempt and by earlier ones.

    Attributes:
        earlier: number of lines that earlier attempts wrote.
    """

    def __init__(self, path: Path, file: BinaryIO, header: bytes):
        self.path, self._file, self._header = path, file, header
        self.earlier = self._written = 0

    def lines(self) -> Iterator[bytes]:
        """Yield the lines written so far, without their ends."""
        with read_errors_name(self._partial), self._partial.open("rb") as file:
            file.readline()
            for line in file:
                yield line.removesuffix(b"\n")

    def write(self, *lines: bytes) -> None:
        """Append lines; they survive the death of this process."""
        with write_errors_name(self._partial):
            self._file.write(b"".join(line + b"\n" for line in lines))
            self._file.flush()
        self._written += len(lines)

    @property
    def _partial(self) -> Path:
        return self.path.with_name(self.path.name + SUFFIX)

    def resume(self) -> None:
        """Count the lines of earlier attempts and cut off one that was not written to its end.

        Raises:
            ConfigError: the attempts had other options.
        """
        self._file.seek(0)
        header = self._file.readline()
        if header.endswith(b"\n") and header != self._header:
            raise ConfigError(
                f"{self._partial} was begun with other options: {_differences(header, self._header)}; "
                "give those again to continue it, or remove it"
            )
        end = len(header) if header.endswith(b"\n") else 0
        for line in self._file if end else ():
            if line.endswith(b"\n"):
                end += len(line)
                self.earlier += 1
        with write_errors_name(self._partial):
            self._file.truncate(end)
            self._file.seek(0, os.SEEK_END)
            if not end:
                self._file.write(self._header)

    def publish(self, inputs: Sequence[str]) -> None:
        """Write the file itself, atomically, and remove the partial one."""
        with new_files(self.path, inputs=inputs) as (output,):
            for line in self.lines():
                output.write(line)
        self._partial.unlink()

    def remove_if_empty(self) -> None:
        """Remove the partial file if there is no line in it to continue from."""
        if not self.earlier + self._written:
            self._partial.unlink(missing_ok=True)


@contextmanager
def resumable_output(
    path: str, made_by: Record, *, inputs: Sequence[str] = ()
) -> Iterator[ResumableOutput]:
    """Write `path`, which appears when the block ends without an error; else its lines are kept.

    Args:
        made_by: everything the lines depend on, such as options; must be equal to continue.
        inputs: files that are read meanwhile, none of which may be `path`.

    Raises:
        ConfigError: `path` is a URL or one of the inputs, or earlier attempts had other options.
        BusyError: another process writes the file.
        DataError: it cannot be written.
    """
    if is_url(path):
        raise ConfigError(
            f"{without_secrets(path)}: an output that a later attempt continues is written to a "
            "folder of this machine; copy it to the URL afterwards"
        )
    target = Path(path)
    if any(os.path.exists(each) and target.exists() and target.samefile(each) for each in inputs):
        raise ConfigError(f"{path} would be read and replaced; give the output another name")
    header = json.dumps(made_by, sort_keys=True).encode() + b"\n"
    partial = target.with_name(target.name + SUFFIX)
    with write_errors_name(target):
        file = partial.open("a+b")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BusyError(f"another process writes to {partial}") from error
        output = ResumableOutput(target, file, header)
        output.resume()
        try:
            yield output
            output.write()
            output.publish(inputs)
        except BaseException:
            output.remove_if_empty()
            raise


def _differences(theirs: bytes, ours: bytes) -> str:
    """Return the names of the options that differ."""
    now = json.loads(ours)
    try:
        then = dict(json.loads(theirs))
    except (ValueError, TypeError):
        then = {}
    names = dict.fromkeys([*then, *now])
    return ", ".join(name for name in names if then.get(name) != now.get(name))
