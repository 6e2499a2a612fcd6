#!/usr/bin/env python
"""Pretrain a GPT that reads a prefix in both directions; flags are those of pretrain_gpt.py."""

import sys
from collections.abc import Sequence

from megatron.training.entry import train_from
from megatron.training.process.launch import run_rank


def main(argv: Sequence[str]) -> int:
    """Train what the command line `argv` asks for; return the exit code."""
    return train_from(argv, "prefix-lm", description=__doc__)


if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
