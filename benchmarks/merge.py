#!/usr/bin/env python
"""Speed of merging token files, beside `cat` of the same bytes in the same run.

Both take turns as processes of their own, start-up included.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

import numpy as np

from megatron.common.cli import ToolParser, run_tool
from megatron.data.token_files.indexed_dataset import IndexedDatasetWriter

ROOT = Path(__file__).resolve().parents[1]
TOKENS_PER_DOCUMENT = 600


def main(argv: Sequence[str]) -> None:
    """Make the files, measure, and print one line each and the ratios."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--files", type=int, default=10)
    parser.add_argument("--mb", type=int, default=50, help="size of each .bin")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--directory", help="where the files go; a temporary one by default")
    args = parser.parse_args(argv)
    # Where it is set, each process compiles this package's modules anew.
    os.unsetenv("PYTHONDONTWRITEBYTECODE")
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        prefixes = make_files(Path(directory), args.files, args.mb)
        bins = " ".join(f"{prefix}.bin" for prefix in prefixes)
        tool = [sys.executable, str(ROOT / "tools" / "merge_preprocessed_data.py")]
        merge = [*tool, "--output-prefix", "merged", "--datasets", *prefixes]
        sides = {
            "cat": ["sh", "-c", f"cat {bins} > cat.bin"],
            "cat and sync": ["sh", "-c", f"cat {bins} > cat.bin && sync cat.bin"],
            "merge serial": merge,
            "merge distributed": [*merge, "--merge", "distributed", "--workers", "2"],
        }
        measured: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for turn in range(args.rounds + 1):
            for name, command in sides.items():
                figures = timed(command, directory)
                if turn:  # the first turn warms up
                    measured[name].append(figures)
        report(measured, args.files * args.mb)


def make_files(directory: Path, files: int, megabytes: int) -> list[str]:
    """Write random tokens, and return the prefixes."""
    documents = megabytes * 1_000_000 // (2 * TOKENS_PER_DOCUMENT)
    random = np.random.default_rng(0)
    for i in range(files):
        with IndexedDatasetWriter(directory / f"p{i}", "u2") as writer:
            tokens = random.integers(0, 50257, documents * TOKENS_PER_DOCUMENT).astype("u2")
            writer.append(tokens, np.full(documents, TOKENS_PER_DOCUMENT))
    return [f"p{i}" for i in range(files)]


def timed(command: Sequence[str], directory: str) -> tuple[float, float]:
    """Return wall and CPU seconds of a command; its outputs are removed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started_at = time.monotonic()
    subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL)
    wall_s = time.monotonic() - started_at
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    for name in ("cat.bin", "merged.bin", "merged.idx"):
        (Path(directory) / name).unlink(missing_ok=True)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall_s, cpu_s


def report(measured: dict[str, list[tuple[float, float]]], megabytes: int) -> None:
    """Print the speed of each side and its ratio to `cat`."""
    cat = [statistics.median(figures) for figures in zip(*measured["cat"], strict=True)]
    for name, figures in measured.items():
        wall_s, cpu_s = (statistics.median(values) for values in zip(*figures, strict=True))
        print(
            f"{name}: wall s: {wall_s:.3f} | CPU s: {cpu_s:.3f} | MB/s: {megabytes / wall_s:.0f} | "
            f"of cat by wall: {cat[0] / wall_s:.2f} | by CPU: {cat[1] / cpu_s:.2f}"
        )


if __name__ == "__main__":
    run_tool(main)
