#!/usr/bin/env python
"""Finetune a GPT on inputs and targets; flags are those of pretrain_gpt.py.

--data-path PREFIX stands for the token files PREFIX_inputs_document and PREFIX_targets_document.
"""

import sys
from collections.abc import Sequence

from megatron.training.entry import train_from
from megatron.training.process.launch import run_rank


def main(argv: Sequence[str]) -> int:
    """Train what the command line `argv` asks for; return the exit code."""
    return train_from(argv, "multitask", description=__doc__)


if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
