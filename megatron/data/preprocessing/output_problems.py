"""What keeps a conversion from writing where it shall, said before the work begins."""

import glob
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_MOST_OF_A_BAD_LINE = 1 << 20  # bytes


def prefix_problems(output_prefix: str, name: str) -> Iterator[str]:
    """Yield a sentence if `output_prefix` ends without a name, or its folder is not there.

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
    """Yield a sentence for each key that cannot be part of the name of a file."""
    for key in keys:
        if "/" in key or "\0" in key:
            yield (
                f"--json-keys {key!r}: the key becomes part of a file name, and cannot be with "
                f"{'/' if '/' in key else 'a zero byte'} in it; rename it in the input"
            )


def replacement_problems(
    outputs: Sequence[str], stage: Path, read: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yield a sentence for each file that this run both reads and replaces or removes.

    Args:
        outputs: paths of what is written.
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
    """Yield a sentence for each reason not to write the list of bad lines to `path`.

    Args:
        outputs: paths of the other files that are written.
        stage: the folder of the work in progress.
        inputs: files or globs.
    """
    said = f"--on-error collect {path}"
    if not os.path.isdir(os.path.dirname(path) or "."):
        yield f"{said}: there is no directory {os.path.dirname(path)}"
    elif os.path.isdir(path):
        yield f"{said} is a directory; give a FILE"
    elif os.path.realpath(path) in map(os.path.realpath, outputs) or _is_in(path, stage):
        yield f"{said} is one of the files that this run writes itself; give another FILE"
    elif any(os.path.samefile(file, path) for file in _files(inputs) if os.path.exists(path)):
        yield f"{said} would replace an --input; give another FILE"
    elif os.path.isfile(path) and not _lists_bad_lines(path):
        yield f"{said} would replace a file that is no list of bad lines; give another FILE, or remove it"


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
