#!/usr/bin/env python
"""Mend texts, and drop what is not English or too short: `cleanup_dataset.py INPUT OUTPUT`."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.common.cli import ToolParser, run_tool
from megatron.common.errors import ConfigError
from megatron.common.process_pool import num_workers, ordered_map
from megatron.extensions.corpora.cleaning.records import batches, new_files, read_lines, total_bytes
from megatron.extensions.corpora.cleaning.repair import (
    MIN_TOKENS,
    CleanDocuments,
    gpt2_counter,
    piece_counter,
)


def main(argv: Sequence[str]) -> None:
    """Clean by the flags `argv`, then print the counts."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("input", help="file with one JSON object a line, text under the key text")
    parser.add_argument("output", help="file for the documents that are left")
    parser.add_argument("--vocab-file", help="vocab.json of GPT-2, to count tokens exactly")
    parser.add_argument("--merge-file", help="merges.txt of GPT-2")
    args = parser.parse_args(argv)

    if (args.vocab_file is None) != (args.merge_file is None):
        raise ConfigError("--vocab-file and --merge-file go together; give both or none")
    make_counter = piece_counter
    if args.vocab_file is None:
        print(
            f"without --vocab-file and --merge-file, the {MIN_TOKENS} tokens a document must have "
            "are counted in words and signs, of which a text has some fewer than tokens",
            file=sys.stderr,
        )
    else:
        make_counter = partial(gpt2_counter, args.vocab_file, args.merge_file)
        make_counter()  # so that a bad file is found before any work
    counts = dict.fromkeys(["fixed", "not English", "small"], 0)
    workers = num_workers(total_bytes([args.input]))
    with new_files(args.output, inputs=[args.input]) as (output,):
        lines = read_lines([args.input])
        for outcomes in ordered_map(CleanDocuments(make_counter), batches(lines), workers):
            for outcome in outcomes:
                counts["fixed"] += len(outcome.changed_by)
                if outcome.dropped_by is None:
                    output.write(outcome.line)
                else:
                    counts[outcome.dropped_by] += 1
    print(
        f"{args.output}: documents: {output.lines} | fixed: {counts['fixed']} | "
        f"dropped, not English: {counts['not English']} | dropped, small: {counts['small']}"
    )


if __name__ == "__main__":
    run_tool(main)
