"""Output files of preprocessing and merging: names, checks, and atomic publication."""

import glob
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron.common.atomic_files import flush, sync_folder
from megatron.common.errors import DataError
from megatron.data.token_files.block_digests import digests_path

log = logging.getLogger(__name__)

RECORD = ".tokenizer.json"
"""Added to a prefix: which tokenizer made the pair. megatron/tokenizer/fingerprint.py reads it."""

_MOST_OF_A_BAD_LINE = 1 << 20  # bytes


def stage_of(output_prefix: str) -> Path:
    """Return the directory of the work in progress, next to the output."""
    return Path(output_prefix + ".stage")


def report_of(output_prefix: str) -> str:
    """Return the path of the report."""
    return output_prefix + ".report.json"


def pair_prefix(output_prefix: str, key: str, *, split_sentences: bool) -> str:
    """Return the path of the token files of `key`, without suffix."""
    return f"{output_prefix}_{key}_{'sentence' if split_sentences else 'document'}"


def output_files(output_prefix: str, keys: Sequence[str], *, split_sentences: bool) -> list[str]:
    """Return the paths of all output files, without the list of bad lines."""
    pairs = [pair_prefix(output_prefix, key, split_sentences=split_sentences) for key in keys]
    pair_files = [pair + end for pair in pairs for end in (".bin", ".bin.xxh3", ".idx", RECORD)]
    return [*pair_files, report_of(output_prefix)]


def prefix_problems(output_prefix: str, name: str) -> Iterator[str]:
    """Yield a message if `output_prefix` ends without a name, or its folder does not exist.

    Args:
        name: proposed as the end of the prefix.
    """
    folder, end = os.path.split(output_prefix)
    if end in ("", ".", ".."):
        yield (
            f"--output-prefix {output_prefix or repr('')} names no files, only a folder; give "
            f"their names a beginning, such as {os.path.join(output_prefix, name)}"
        )
    folder = os.path.join(folder, end) if end in (".", "..") else folder
    if os.path.isdir(folder or "."):
        return
    if os.path.exists(folder):
        yield f"--output-prefix {output_prefix}: {folder} is a file, and no folder"
    else:
        yield f"--output-prefix {output_prefix}: there is no folder {folder}; mkdir -p {folder}"


def key_problems(keys: Sequence[str]) -> Iterator[str]:
    """Yield a message for each key that cannot be part of a file name."""
    for key in keys:
        if "/" in key or "\0" in key:
            yield (
                f"--json-keys {key!r}: the key becomes part of a file name, and cannot be with "
                f"{'/' if '/' in key else 'a zero byte'} in it; rename it in the input"
            )


def replacement_problems(
    outputs: Sequence[str], stage: Path, read: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yield a message for each file that this run both reads and replaces or removes.

    Args:
        outputs: paths of the written files.
        stage: the folder of the work in progress.
        read: for each flag the files or globs that it names.
    """
    written = {(at.st_dev, at.st_ino): path for path in outputs for at in _status(path)}
    for flag, patterns in read.items():
        for file in _files(patterns):
            for at in _status(file):
                if output := written.get((at.st_dev, at.st_ino)):
                    yield (
                        f"{flag} {file} would be replaced: this run writes {output}; give another "
                        "--output-prefix"
                    )
            if _is_in(file, stage):
                yield (
                    f"{flag} {file} lies in {stage}, which this run empties; move it, or give "
                    "another --output-prefix"
                )


def collection_problems(
    path: str, outputs: Sequence[str], stage: Path, inputs: Sequence[str]
) -> Iterator[str]:
    """Yield a message for each reason not to write the list of bad lines to `path`.

    Args:
        outputs: paths of the other files that are written.
        stage: the folder of the work in progress.
        inputs: files or globs.
    """
    flag = f"--on-error collect {path}"
    if not os.path.isdir(os.path.dirname(path) or "."):
        yield f"{flag}: there is no directory {os.path.dirname(path)}"
    elif os.path.isdir(path):
        yield f"{flag} is a directory; give a FILE"
    elif os.path.realpath(path) in map(os.path.realpath, outputs) or _is_in(path, stage):
        yield f"{flag} is one of the files that this run writes itself; give another FILE"
    elif any(os.path.samefile(file, path) for file in _files(inputs) if os.path.exists(path)):
        yield f"{flag} would replace an --input; give another FILE"
    elif os.path.isfile(path) and not _lists_bad_lines(path):
        yield f"{flag} would replace a file that is no list of bad lines; give another FILE, or remove it"


def _files(patterns: Sequence[str]) -> list[str]:
    """Return the files that are there."""
    named = [file for each in patterns for file in (each, *glob.glob(each, recursive=True))]
    return [file for file in dict.fromkeys(named) if os.path.exists(file)]


def _status(path: str) -> list[os.stat_result]:
    return [os.stat(path)] if os.path.exists(path) else []


def _is_in(path: str, folder: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _lists_bad_lines(path: str) -> bool:
    with open(path, "rb") as file:
        first = file.readline(_MOST_OF_A_BAD_LINE)
    with suppress(ValueError, TypeError):  # no JSON, or a number
        return not first or {"problem", "excerpt"} <= set(json.loads(first))
    return False


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
    """Yield a notice for each existing pair of token files that will be replaced."""
    for prefix in prefixes:
        there = [f"{prefix}{end}" for end in (".bin", ".idx") if os.path.exists(prefix + end)]
        if there:
            yield f"replaces {' and '.join(there)} when the new files are complete"


@contextmanager
def staged_record(
    prefixes: Iterable[str], record: str, *, is_kept: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Write `record` as PREFIX.tokenizer.json of the pairs that are published within this context.

    Without one, an older pair's record is removed with that pair. On failure nothing is left or
    removed, unless `is_kept()`: then a later `publish_pair` finds it.
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
    """Rename the staged record; an empty one means that the pair has none."""
    staged = _staged_record(prefix)
    if staged.exists() and staged.stat().st_size:
        os.replace(staged, prefix + RECORD)
    elif staged.exists():
        Path(prefix + RECORD).unlink(missing_ok=True)
        staged.unlink()


def _staged_record(prefix: str) -> Path:
    return Path(f"{prefix}{RECORD}.new")


@contextmanager
def write_errors_name(path: str | Path) -> Iterator[None]:
    """Turn an error of the file system into a DataError that names `path`.

    Raises:
        DataError: the disk is full, the directory missing or not writable.
    """
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error
