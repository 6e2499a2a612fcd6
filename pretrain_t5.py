#!/usr/bin/env python
"""Pretrain T5: a decoder restores the spans that sentinels replace; data is split into sentences."""

import sys
from collections.abc import Sequence

from megatron.training.entry import train_from
from megatron.training.process.launch import run_rank


def main(argv: Sequence[str]) -> int:
    """Train by the command line `argv`; return the exit code."""
    return train_from(argv, "t5", description=__doc__)


if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
