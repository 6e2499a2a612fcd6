#!/usr/bin/env python
"""Pretrain Retro: a GPT that attends to neighbors of each chunk, which were retrieved before."""

import sys
from collections.abc import Sequence

from megatron.training.entry import train_from
from megatron.training.process.launch import run_rank


def main(argv: Sequence[str]) -> int:
    """Train by the command line `argv`; return the exit code."""
    return train_from(argv, "retro", description=__doc__)


if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
