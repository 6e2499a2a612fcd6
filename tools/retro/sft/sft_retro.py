#!/usr/bin/env python
"""Finetune a Retro, or a GPT, on questions and answers (InstructRetro); flags as in pretraining.

--data-path names sets of questions, with weights to blend several; --data-folder is the directory of
their files NAME/NAME_QA_train.json. Without --retro-add-retriever the network is a GPT.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it runs from anywhere

from megatron.training.entry import train_from
from megatron.training.process.launch import run_rank


def main(argv: Sequence[str]) -> int:
    """Train by the command line `argv`; return the exit code."""
    return train_from(argv, "instruct-retro", description=__doc__)


if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
