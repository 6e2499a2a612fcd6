#!/usr/bin/env python
"""Group the URLs of similar documents: `group_duplicate_url.py PAIRS OUTPUT [THRESHOLD]`."""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.common.cli import ToolParser, run_tool
from megatron.common.errors import ConfigError
from megatron.extensions.corpora.cleaning.groups import Groups, read_pairs
from megatron.extensions.corpora.cleaning.records import new_files, to_bytes

THRESHOLD = 0.7


def main(argv: Sequence[str]) -> None:
    """Group by the flags `argv`, then print the counts."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("pairs", help="file that find_duplicates.py wrote")
    parser.add_argument(
        "output", help="file for the groups: one object a line, {index: [URL, ...]}"
    )
    parser.add_argument(
        "threshold",
        nargs="?",
        type=float,
        default=THRESHOLD,
        help=f"pairs with a similarity above it are joined; default: {THRESHOLD}",
    )
    args = parser.parse_args(argv)

    if not 0 <= args.threshold <= 1:
        raise ConfigError(f"threshold {args.threshold}: give a number from 0 to 1")
    with new_files(args.output, inputs=[args.pairs]) as (output,):
        groups = Groups()
        for main_url, other_url, similarity in read_pairs(args.pairs):
            if similarity > args.threshold:
                groups.join(main_url, other_url)
        num_urls = 0
        for index, urls in enumerate(groups):
            output.write(to_bytes({str(index): urls}))
            num_urls += len(urls)
    print(f"{args.output}: groups: {output.lines} | URLs: {num_urls}")


if __name__ == "__main__":
    run_tool(main)
