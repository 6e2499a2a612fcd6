#!/usr/bin/env python
"""Find the neighbors of all samples of a run, for pretrain_retro.py.

Cuts documents into chunks (db-build), makes an index of their embeddings (index-train, index-add), and
searches it for the neighbors of the chunks of all samples (query-neighbors). Several processes under a
launcher share the work; a command that was stopped continues when it is given again.
"""

import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.common import logging as log
from megatron.common.cli import run_tool
from megatron.common.errors import raise_if_any
from megatron.extensions.retro.embedders import counter_of, embedder_of
from megatron.extensions.retro.retrieval.blocks import Ranks
from megatron.extensions.retro.retrieval.flags import (
    RetroPreprocessingConfig,
    retro_preprocessing_problems,
    retro_tasks,
)
from megatron.extensions.retro.retrieval.project import prepare_project, read_retro_flags
from megatron.extensions.retro.retrieval.retro_tasks import run_tasks, validate_tasks
from megatron.training.process.environment import cpu_threads, read_launch
from megatron.training.process.launchers import write_root_cause


def main(argv: Sequence[str]) -> None:
    """Run the tasks of the command line `argv`, as one of the ranks that a launcher started."""
    launch = read_launch(None)
    log.configure(rank=launch.rank)
    parsed = read_retro_flags(argv, description=__doc__)
    config: RetroPreprocessingConfig = parsed.sections["retro"]
    tasks = retro_tasks(config.retro_tasks)
    raise_if_any(retro_preprocessing_problems(config))
    ranks = Ranks(
        launch.rank,
        launch.world_size,
        num_cores=cpu_threads(launch),
        timeout_s=config.retro_timeout_s,
    )
    project = prepare_project(config, ranks)
    run = run_tasks if config.retro_task_validate is None else validate_tasks
    lines = run(
        project,
        tasks,
        ranks,
        make_counter=counter_of(project),
        make_embedder=embedder_of(project, launch),
    )
    for line in chain(parsed.notices, lines):
        if ranks.is_first or config.retro_task_validate is not None:
            print(line, flush=True)


if __name__ == "__main__":
    run_tool(main, on_error=write_root_cause)
