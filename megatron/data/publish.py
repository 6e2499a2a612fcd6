"""How a file appears under its name: whole, or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.errors import DataError


def temporary_beside(path: Path) -> Path:
    """Return an unused name in the directory of `path`, so that a rename can publish the file."""
    return path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def publish(temporary: Path, path: Path) -> None:
    """Flush the finished file `temporary` to the disk and rename it to `path`."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


@contextmanager
def write_errors_name(path: Path) -> Iterator[None]:
    """Turn an error of the file system into a DataError that names `path`.

    Raises:
        DataError: the disk is full, the directory missing or not writable.
    """
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error
