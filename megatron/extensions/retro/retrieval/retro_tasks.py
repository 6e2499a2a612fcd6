"""Tasks of Retro preprocessing, in order, on one rank of several."""

from collections.abc import Iterator, Sequence

from megatron.extensions.retro.retrieval.blocks import Ranks
from megatron.extensions.retro.retrieval.database_build import (
    MakeCounter,
    build_database,
    validate_database,
)
from megatron.extensions.retro.retrieval.flags import RetroPreprocessingConfig
from megatron.extensions.retro.retrieval.index_build import (
    MakeEmbedder,
    fill_index,
    train_index,
    validate_adding,
    validate_training,
)
from megatron.extensions.retro.retrieval.neighbors import query_neighbors, validate_neighbors
from megatron.extensions.retro.retrieval.project import Project


def run_tasks(
    project: Project,
    tasks: Sequence[str],
    ranks: Ranks,
    *,
    make_counter: MakeCounter,
    make_embedder: MakeEmbedder,
) -> Iterator[str]:
    """Run tasks of Retro preprocessing; yield a line after each.

    Raises:
        ConfigError: settings do not fit the data.
        DataError: files are missing or damaged, or cannot be written.

    Communication: waits for the other ranks, through files.
    """
    for task in tasks:
        if task == "db-build":
            build_database(project, make_counter, ranks)
        elif task == "index-train":
            train_index(project, make_embedder, ranks)
        elif task == "index-add":
            fill_index(project, make_embedder, ranks)
        else:
            query_neighbors(project, make_embedder, ranks)
        yield f"{task}: done"


def validate_tasks(
    project: Project,
    tasks: Sequence[str],
    ranks: Ranks,
    *,
    make_counter: MakeCounter,
    make_embedder: MakeEmbedder,
) -> Iterator[str]:
    """Compute blocks of tasks again, and compare; yield a line for each folder of blocks.

    Raises:
        DataError: a block is missing, damaged or has other content.
    """
    config: RetroPreprocessingConfig = project.config
    fraction = config.retro_task_validate or 1.0
    for task in tasks:
        if task == "db-build":
            yield from validate_database(project, make_counter, ranks, fraction=fraction)
        elif task == "index-train":
            yield validate_training(project, make_embedder, ranks, fraction=fraction)
        elif task == "index-add":
            yield validate_adding(project, make_embedder, ranks, fraction=fraction)
        else:
            yield from validate_neighbors(project, make_embedder, ranks, fraction=fraction)
