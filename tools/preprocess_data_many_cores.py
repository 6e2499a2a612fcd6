#!/usr/bin/env python
"""Turn texts into token files on a machine with many cores.

Same flags and files as tools/preprocess_data.py, whose workers share no reader or writer.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from megatron.common import logging as log
from megatron.common.cli import run_tool
from megatron.data.preprocessing.command import read_flags
from megatron.data.preprocessing.preprocess import preprocess


def main(argv: Sequence[str]) -> None:
    """Convert by the flags `argv`, then print the written files."""
    log.configure(rank=0)
    command = read_flags(argv, description=__doc__)
    for notice in command.notices:
        print(notice)
    command.deliver(preprocess(command.spec))


if __name__ == "__main__":
    run_tool(main)
