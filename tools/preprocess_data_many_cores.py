#!/usr/bin/env python
"""Turn texts into token files on a machine with many cores.

Flags and files are those of tools/preprocess_data.py. The input is divided, so that no single
process reads or writes everything; the documents keep their order all the same.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from megatron.common import logging as log
from megatron.common.cli import run_tool
from megatron.data.preprocessing.command import read_flags, say_written
from megatron.data.preprocessing.preprocess import preprocess

WORKERS_PER_PARTITION = 5  # divides 60 workers on 40 cores into 12 partitions


def main(argv: Sequence[str]) -> None:
    """Convert as `argv` says, then say what was written."""
    log.configure(rank=0)
    asked = read_flags(argv, description=__doc__, workers_per_partition=WORKERS_PER_PARTITION)
    for notice in asked.notices:
        print(notice)
    say_written(preprocess(asked.conversion))


if __name__ == "__main__":
    run_tool(main)
