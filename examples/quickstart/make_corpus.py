#!/usr/bin/env python
"""Write the source files of Python's standard library as JSON lines: text that every machine has."""

import hashlib
import json
import os
import sysconfig
import tokenize
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
}
"""Folders without library code: other people's packages, tests, and generated tables."""


def main() -> None:
    """Write files to --output until --max-mb is reached, and say how many."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="the file to write")
    parser.add_argument(
        "--max-mb", type=float, default=1000, help="stop before so many megabytes of text"
    )
    args = parser.parse_args()

    library = Path(sysconfig.get_path("stdlib"))
    documents, left = 0, args.max_mb * 1e6
    # Under another name until it is complete, so that a file in its place is a whole one.
    unfinished = args.output.with_suffix(".unfinished")
    with unfinished.open("w", encoding="utf-8") as stream:
        for file in source_files(library):
            text = read_source(file)
            size = len(text.encode())
            if size > left:
                break
            if not text.strip():
                continue
            name = file.relative_to(library).as_posix()
            stream.write(json.dumps({"text": text, "path": name}) + "\n")
            documents, left = documents + 1, left - size
    os.replace(unfinished, args.output)
    megabytes = args.max_mb - left / 1e6
    print(f"{args.output}: {documents} source files of {library}, {megabytes:.1f} MB of text")


def source_files(library: Path) -> Iterator[Path]:
    """Yield the library's files, mixed: in the same order wherever the library is installed."""
    files = (
        file
        for file in library.rglob("*.py")
        if not SKIPPED.intersection(file.relative_to(library).parts)
    )
    yield from sorted(files, key=lambda file: _mixed(file.relative_to(library).as_posix()))


def read_source(file: Path) -> str:
    """Return the text of a source file in the encoding that it declares; "" if it has none."""
    try:
        with tokenize.open(file) as stream:
            return stream.read()
    except (SyntaxError, UnicodeDecodeError):
        return ""


def _mixed(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


if __name__ == "__main__":
    main()
