#!/usr/bin/env python
"""Keep the first of each group of documents: `remove_group_duplicates.py GROUPS DATA OUTPUT`."""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.common.cli import ToolParser, run_tool
from megatron.extensions.corpora.cleaning.groups import read_groups
from megatron.extensions.corpora.cleaning.records import new_files, read_lines


def main(argv: Sequence[str]) -> None:
    """Remove by the flags `argv`, then print the counts."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("groups", help="file that group_duplicate_url.py wrote")
    parser.add_argument("data", help="file with one JSON object a line, keys url and text")
    parser.add_argument("output", help="file for the documents that are left")
    args = parser.parse_args(argv)

    inputs = [args.groups, args.data]
    removed = removed_chars = 0
    with new_files(args.output, inputs=inputs) as (output,):
        firsts: set[str] = set()
        unwanted: set[str] = set()
        for first, *others in filter(None, read_groups(args.groups)):
            firsts.add(first)
            unwanted.update(others)
        for line in read_lines([args.data]):
            record = line.record()
            url = line.text(record, "url")
            if url in unwanted:
                removed += 1
                removed_chars += len(line.text(record, "text"))
                continue
            output.write(line.raw)
            if url in firsts:  # a second document of this name is a duplicate too
                unwanted.add(url)
    print(
        f"{args.output}: documents: {output.lines} | removed: {removed} | "
        f"characters removed: {removed_chars}"
    )


if __name__ == "__main__":
    run_tool(main)
