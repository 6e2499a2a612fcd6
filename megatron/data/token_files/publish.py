"""How a file appears under its name: whole, or not at all."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron.common.atomic_files import flush, sync_folder
from megatron.common.errors import DataError
from megatron.data.token_files.block_digests import digests_path

log = logging.getLogger(__name__)

RECORD = ".tokenizer.json"
"""Added to a prefix: which tokenizer made the pair. megatron/tokenizer/fingerprint.py reads it."""


def publish_pair(
    bin_temporary: Path, idx_temporary: Path, digests_temporary: Path, prefix: str
) -> None:
    """Flush the finished files and rename them to PREFIX.bin, PREFIX.idx and PREFIX.bin.xxh3.

    The index of an older pair goes first, so that at no moment it belongs to other tokens, and
    the new one comes last: where it is, record and digests are too. A file that is not there was
    renamed before, by a run that was killed in between.
    """
    bin_path, idx_path = Path(prefix + ".bin"), Path(prefix + ".idx")
    with write_errors_name(bin_path):
        flush(idx_temporary)
        if bin_temporary.exists():
            flush(bin_temporary)
            flush(digests_temporary)
            idx_path.unlink(missing_ok=True)
            _publish_record(prefix)
            if digests_temporary.exists():
                os.replace(digests_temporary, digests_path(bin_path))
            os.replace(bin_temporary, bin_path)
    with write_errors_name(idx_path):
        if idx_temporary.exists():
            os.replace(idx_temporary, idx_path)
        sync_folder(idx_path.parent)


def replacement_notices(prefixes: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for each pair of token files that is there and will be replaced."""
    for prefix in prefixes:
        there = [f"{prefix}{end}" for end in (".bin", ".idx") if os.path.exists(prefix + end)]
        if there:
            yield f"replaces {' and '.join(there)} when the new files are complete"


@contextmanager
def staged_record(
    prefixes: Iterable[str], record: str, *, is_kept: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Have pairs that are published in here get `record` as PREFIX.tokenizer.json.

    Without one, that of an older pair goes with that pair. On failure nothing is left or removed,
    unless `is_kept()`: then a later `publish_pair` finds it.
    """
    prefixes = list(prefixes)
    try:
        for prefix in prefixes:
            with write_errors_name(Path(prefix + RECORD)):
                _staged_record(prefix).unlink(missing_ok=True)  # of a run that was killed
                if record or Path(prefix + RECORD).exists():
                    _staged_record(prefix).write_text(record, encoding="utf-8")
                    flush(_staged_record(prefix))
        yield
    except BaseException:
        if not is_kept():
            for prefix in prefixes:
                with suppress(OSError):
                    _staged_record(prefix).unlink()
        raise


def _publish_record(prefix: str) -> None:
    """Give the staged record its name; an empty one says that there is to be none."""
    staged = _staged_record(prefix)
    if staged.exists() and staged.stat().st_size:
        os.replace(staged, prefix + RECORD)
    elif staged.exists():
        Path(prefix + RECORD).unlink(missing_ok=True)
        staged.unlink()


def _staged_record(prefix: str) -> Path:
    return Path(f"{prefix}{RECORD}.new")


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
