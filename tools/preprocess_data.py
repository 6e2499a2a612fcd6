#!/usr/bin/env python
"""Turn texts into the token files (.bin and .idx) that training reads."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere
# Without products of matrices, numpy's threads for them only cost 0.1 CPU seconds at the start.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from megatron.common import logging as log
from megatron.common.cli import run_tool
from megatron.config.tools.preprocess import WorkerTrialConfig
from megatron.data.preprocessing.command import read_flags
from megatron.data.preprocessing.preprocess import preprocess
from megatron.data.preprocessing.worker_counts import try_worker_counts


def main(argv: Sequence[str]) -> None:
    """Convert by the flags `argv`, then print the written files."""
    log.configure(rank=0)
    command = read_flags(argv, description=__doc__, extra={"trial": WorkerTrialConfig})
    trial: WorkerTrialConfig = command.sections["trial"]
    if trial.find_optimal_num_workers:
        counts, most = trial.workers_to_check, trial.max_documents
        for line in try_worker_counts(command.spec, counts, most):
            print(line, flush=True)
        return
    for notice in command.notices:
        print(notice)
    command.deliver(preprocess(command.spec))


if __name__ == "__main__":
    run_tool(main)
