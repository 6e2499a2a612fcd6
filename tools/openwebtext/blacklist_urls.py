#!/usr/bin/env python
"""Drop the URLs that are not worth downloading: `blacklist_urls.py DIRECTORY OUTPUT`."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

import numpy as np

from megatron.common.cli import ToolParser, run_tool
from megatron.common.errors import ConfigError
from megatron.extensions.corpora.cleaning.records import new_files, read_lines
from megatron.extensions.corpora.cleaning.urls import REASONS, digest, reason_against


def main(argv: Sequence[str]) -> None:
    """Filter by the flags `argv`, then print the counts."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("directory", help="reads the URLs of its *.txt files, one a line")
    parser.add_argument("output", help="file for the URLs that are left, in the order of input")
    args = parser.parse_args(argv)

    inputs = [str(path) for path in sorted(Path(args.directory).glob("*.txt"))]
    if not inputs:
        raise ConfigError(f"no *.txt file in {args.directory}")
    counts = dict.fromkeys([*REASONS, "duplicate"], 0)
    digests = bytearray()
    with new_files(args.output, inputs=inputs) as (output,):
        # Two passes: 8 bytes of each URL are kept, not the URL, to detect repeated ones.
        for url in urls_worth_reading(inputs, counts):
            digests += digest(url).to_bytes(8, "little")
        is_first = first_of_each(np.frombuffer(digests, "<u8"))
        counts["duplicate"] = int((~is_first).sum())
        unused: dict[str, int] = {}
        for url, keep in zip(urls_worth_reading(inputs, unused), is_first, strict=True):
            if keep:
                output.write(url.encode("utf-8", "surrogateescape"))
    dropped = " | ".join(f"{reason}: {count}" for reason, count in counts.items())
    print(f"{args.output}: URLs: {output.lines} | {dropped}")


def urls_worth_reading(inputs: Sequence[str], counts: dict[str, int]) -> Iterator[str]:
    """Yield the URLs that pass all filters, and count refused ones by the reason."""
    for line in read_lines(inputs):
        url = line.raw.decode("utf-8", "surrogateescape").strip()
        reason = reason_against(url)
        if reason is None:
            yield url
        else:
            counts[reason] = counts.get(reason, 0) + 1


def first_of_each(values: np.ndarray) -> np.ndarray:
    """Return for each value whether no earlier one is equal."""
    is_first = np.zeros(len(values), bool)
    is_first[np.unique(values, return_index=True)[1]] = True
    return is_first


if __name__ == "__main__":
    run_tool(main)
