#!/usr/bin/env python
"""Extractive question answering (SQuAD 1.1 and 2.0): finetune a BERT, evaluate it, predict answers.

Takes flags, and settings of NeMo's scripts: KEY=VALUE, over a YAML file that --config-path and
--config-name name.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from megatron.extensions.tasks.entry import train_text_task
from megatron.training.process.launch import run_rank


def main(argv: Sequence[str]) -> int:
    """Run the task of the command line `argv`; return the exit code."""
    return train_text_task(argv, "question-answering", description=__doc__)


if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
