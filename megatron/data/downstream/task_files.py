"""Lines of the files of downstream tasks, and errors that name file and line."""

import io
from collections.abc import Iterator
from pathlib import Path

from megatron.common.errors import WrongDataError, near, reason

EXCERPT = 60
"""Characters of a wrong field or line that a message shows."""


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    r"""Yield the number, from 1, and the text of each line that is not blank, without its end.

    Lines end in \n, \r\n or \r. A byte order mark is skipped.

    Raises:
        WrongDataError: the file cannot be read, or is not UTF-8.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise WrongDataError(f"cannot read {path}: {reason(error, path)}{near(path)}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise wrong_line(path, number, f"byte {error.start} of the file is not UTF-8") from error
    for number, line in enumerate(io.StringIO(text, newline=None), start=1):
        line = line.removesuffix("\n")
        if line.strip(" "):
            yield number, line


def wrong_line(path: Path, number: int, problem: str) -> WrongDataError:
    """Return the error of one line of a file."""
    return WrongDataError(f"{path}, line {number}: {problem}")
