"""stdout and stderr that never fail: a full log disk, or a reader that has ended, loses lines only."""

import io
import os
import sys
from contextlib import suppress
from typing import Any, TextIO

from megatron.common.errors import reason


class _Lossy(io.FileIO):
    """Descriptor of a standard stream; output that it does not take is lost."""

    def __init__(self, descriptor: int, name: str):
        super().__init__(descriptor, "w", closefd=False)
        self.lost = ""
        self._name = name

    def write(self, data: Any, /) -> int:
        """Write, and report the first failure on stderr."""
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)  # its reader has ended, as `head` does
        except OSError as error:
            if not self.lost:
                self.lost = f"{self._name} cannot be written to ({reason(error)})"
                line = (
                    f"WARNING: {self.lost}: lines are lost until it can, and the program goes on\n"
                )
                with suppress(OSError):
                    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode())
            return len(data)


def keep_writable() -> None:
    """Replace this process's stdout and stderr by streams whose writes never fail.

    Closed ones become /dev/null, or the next file that is opened would get their output.
    """
    for descriptor, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest descriptor that is free
        if descriptor and (stream := _lossy(getattr(sys, name), descriptor, name)):
            setattr(sys, name, stream)


def lost_output() -> str:
    """Return why output of this process was lost; "" if none was."""
    found = [_raw(stream) for stream in (sys.stdout, sys.stderr)]
    return "; ".join(raw.lost for raw in found if isinstance(raw, _Lossy) and raw.lost)


def _raw(stream: TextIO) -> object:
    return getattr(getattr(stream, "buffer", None), "raw", None)


def _lossy(stream: TextIO | None, descriptor: int, name: str) -> TextIO | None:
    """Return the replacement of a standard stream; None if a program has already replaced it."""
    if stream is None:
        return io.TextIOWrapper(_buffered_writer(descriptor, name), errors="replace")
    if type(stream) is not io.TextIOWrapper or isinstance(_raw(stream), _Lossy):
        return None
    with suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        _buffered_writer(stream.fileno(), name),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering or stream.write_through,
    )


def _buffered_writer(descriptor: int, name: str) -> io.BufferedWriter:
    return io.BufferedWriter(_Lossy(descriptor, name))
