#!/usr/bin/env python
"""Print the recall of the index of a Retro project: how many of the nearest chunks it finds.

Searches the index for chunks of documents that are not in the database, and compares what it finds with
a search of all chunks, as an index Flat does it. Indices of one project are built with index-build and
--retro-index-str of tools/retro/preprocess_data.py.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.common import logging as log
from megatron.common.cli import run_tool
from megatron.common.errors import raise_if_any
from megatron.extensions.retro.embedders import embedder_of
from megatron.extensions.retro.retrieval.blocks import Ranks
from megatron.extensions.retro.retrieval.flags import (
    RetroPreprocessingConfig,
    RetroRecallConfig,
    retro_preprocessing_problems,
    retro_recall_problems,
)
from megatron.extensions.retro.retrieval.project import prepare_project, read_retro_flags
from megatron.extensions.retro.retrieval.recall import measure_recall
from megatron.training.process.environment import Launch, cpu_threads


def main(argv: Sequence[str]) -> None:
    """Print the recall of the index that the command line `argv` names."""
    log.configure(rank=0)
    parsed = read_retro_flags(argv, description=__doc__, extra={"recall": RetroRecallConfig})
    config: RetroPreprocessingConfig = parsed.sections["retro"]
    options: RetroRecallConfig = parsed.sections["recall"]
    raise_if_any((*retro_preprocessing_problems(config), *retro_recall_problems(options)))
    launch = Launch(0, 1, 0, 1)
    ranks = Ranks(num_cores=cpu_threads(launch))
    project = prepare_project(config, ranks)
    for line in measure_recall(project, options, embedder_of(project, launch), ranks):
        print(line, flush=True)


if __name__ == "__main__":
    run_tool(main)
