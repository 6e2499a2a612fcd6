#!/usr/bin/env python
"""Finetune a GPT on inputs and targets: finetune_t0_non_causal_decoder.py, as BLOOMZ's scripts name it."""

import sys
from functools import partial

from megatron.training.entry import train_from
from megatron.training.process.launch import run_rank

main = partial(train_from, objective="multitask", description=__doc__)

if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
