"""Build of the index (index-train, index-add): embeddings by blocks, training, adding."""

import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.common.atomic_files import replacing
from megatron.common.errors import ConfigError
from megatron.data.token_files.publish import write_errors_name
from megatron.extensions.retro.retrieval.blocks import Arrays, Blocks, Ranks, table_blocks
from megatron.extensions.retro.retrieval.chunk_database import TRAIN, read_chunks
from megatron.extensions.retro.retrieval.database_build import SAMPLED, text_of
from megatron.extensions.retro.retrieval.embedders import Embedder
from megatron.extensions.retro.retrieval.flags import RetroPreprocessingConfig
from megatron.extensions.retro.retrieval.project import Project
from megatron.extensions.retro.retrieval.vector_index import VectorIndex, new_index, read_index
from megatron.tokenizer.build import build_tokenizer

log = logging.getLogger(__name__)

_KEY = "data"
_BATCH = 10_000  # chunks whose texts are in memory together

MakeEmbedder = Callable[[], Embedder]
"""Loads the embedder, which takes time and memory."""


class ChunkEmbeddings:
    """Embeddings of the chunks in a file of the database, by row.

    Args:
        file: from the project directory on.
    """

    def __init__(self, project: Project, file: Path, make_embedder: MakeEmbedder):
        self._chunks = read_chunks(project.directory / file)
        self._datasets = project.datasets
        self._tokenizer = build_tokenizer(**project.tokenizer_arguments)
        self.embedder = make_embedder()

    def __len__(self) -> int:
        return len(self._chunks)

    def of(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the embeddings of rows. Shapes: [n] -> [n, width]."""
        vectors = np.empty((len(rows), self.embedder.width), np.float32)
        for first in range(0, len(rows), _BATCH):
            batch = slice(first, first + _BATCH)
            texts = [
                text_of(self._datasets[dataset].get(document, start, end - start), self._tokenizer)
                for dataset, document, start, end, _ in self._chunks[rows[batch]].tolist()
            ]
            vectors[batch] = self.embedder.embed(texts)
        return vectors


def index_folder(project: Project) -> Path:
    """Return the folder of the index of the project's type and kind."""
    config: RetroPreprocessingConfig = project.config
    return project.directory / "index" / config.retro_index_type / config.retro_index_str


def empty_index_file(project: Project) -> Path:
    """Return the path of the index that is trained and has no vectors."""
    config: RetroPreprocessingConfig = project.config
    fraction = config.retro_index_train_load_fraction
    return index_folder(project) / f"empty_{fraction:.3f}.faissindex"


def filled_index_file(project: Project) -> Path:
    """Return the path of the index with the chunks of the database."""
    config: RetroPreprocessingConfig = project.config
    fractions = config.retro_index_train_load_fraction, config.retro_index_add_load_fraction
    return index_folder(project) / "added_{:.3f}_{:.3f}.faissindex".format(*fractions)


def train_index(project: Project, make_embedder: MakeEmbedder, ranks: Ranks) -> None:
    """Write the trained index without vectors: all ranks embed the sample, the first one trains.

    Raises:
        ConfigError: there is no such kind of index.
        DataError: files are missing or damaged, or cannot be written.

    Communication: waits for the other ranks, through files.
    """
    config: RetroPreprocessingConfig = project.config
    file = empty_index_file(project)
    if not file.exists():
        embeddings = ChunkEmbeddings(project, SAMPLED, make_embedder)
        width = embeddings.embedder.width
        index = new_index(config.retro_index_str, width, num_threads=ranks.num_cores)
        if index.needs_training:
            blocks = _embedding_blocks(project, len(embeddings), width)
            blocks.fill(_embed(embeddings), ranks)
            if ranks.is_first:
                fraction = config.retro_index_train_load_fraction
                log.info("%s: training begins", index.kind)
                index.train(_sample(blocks, fraction, width))
        if ranks.is_first:
            _write_index(index, file)
            if config.retro_index_delete_training_embeddings:
                with suppress(FileNotFoundError):
                    shutil.rmtree(project.directory / "index" / "train_emb")
    ranks.wait(lambda: "" if file.exists() else str(file))


def fill_index(project: Project, make_embedder: MakeEmbedder, ranks: Ranks) -> None:
    """Write the index with the chunks of the database: all ranks encode them, the first one adds.

    Raises:
        DataError: files are missing or damaged, or cannot be written.

    Communication: waits for the other ranks, through files.
    """
    config: RetroPreprocessingConfig = project.config
    file = filled_index_file(project)
    if not file.exists():
        blocks, compute, index, rows = _codes(project, make_embedder, ranks)
        blocks.fill(compute, ranks)
        if ranks.is_first:
            add = index.add if config.retro_index_type == "faiss-base" else index.add_codes
            for block, arrays in zip(blocks.ranges, blocks, strict=True):
                add(arrays[_KEY], rows[block.start : block.stop])
            _write_index(index, file)
            if config.retro_index_delete_added_codes:
                shutil.rmtree(blocks.folder)
    ranks.wait(lambda: "" if file.exists() else str(file))


def validate_training(
    project: Project, make_embedder: MakeEmbedder, ranks: Ranks, *, fraction: float
) -> str:
    """Compute a fraction of the embeddings of the sample again; return a line about them.

    Raises:
        DataError: a block has other content.
    """
    embeddings = ChunkEmbeddings(project, SAMPLED, make_embedder)
    blocks = _embedding_blocks(project, len(embeddings), embeddings.embedder.width)
    if not blocks.folder.exists():
        return (
            f"{blocks.folder} is not there: --no-retro-index-delete-training-embeddings keeps it, "
            "and an index that needs no training has none"
        )
    return blocks.validate(_embed(embeddings), ranks, fraction=fraction)


def validate_adding(
    project: Project, make_embedder: MakeEmbedder, ranks: Ranks, *, fraction: float
) -> str:
    """Recompute a sample of the codes and compare; return a one-line summary.

    Raises:
        DataError: a block has other content.
    """
    blocks, compute, _, _ = _codes(project, make_embedder, ranks)
    if not blocks.folder.exists():
        return f"{blocks.folder} does not exist: --no-retro-index-delete-added-codes keeps it"
    return blocks.validate(compute, ranks, fraction=fraction)


def _embedding_blocks(project: Project, num_rows: int, width: int) -> Blocks:
    config: RetroPreprocessingConfig = project.config
    return table_blocks(
        project.directory / "index" / "train_emb" / "blocks",
        _KEY,
        num_rows=num_rows,
        size=config.retro_block_size,
        width=width,
        dtype=np.float32,
    )


def _embed(embeddings: ChunkEmbeddings) -> Callable[[range], Arrays]:
    return lambda rows: {_KEY: embeddings.of(np.arange(rows.start, rows.stop))}


def _sample(blocks: Blocks, fraction: float, width: int) -> NDArray[np.float32]:
    """Write a fraction of the embeddings to one file, and map it into memory."""
    file = blocks.folder.parent / f"train_{fraction:.3f}.bin"
    num_rows = blocks.ranges[-1].stop
    chosen = rows_of_fraction(num_rows, fraction)
    with write_errors_name(file), replacing(file) as temporary, temporary.open("wb") as opened:
        for block, arrays in zip(blocks.ranges, blocks, strict=True):
            first, last = np.searchsorted(chosen, [block.start, block.stop])
            opened.write(arrays[_KEY][chosen[first:last] - block.start].tobytes())
    return np.memmap(file, np.float32, "r", shape=(len(chosen), width))


def rows_of_fraction(num_rows: int, fraction: float) -> NDArray[np.int64]:
    """Return rows at equal distances: a fraction of all, and at least one.

    >>> rows_of_fraction(10, 0.5).tolist()
    [0, 2, 4, 6, 8]
    """
    count = max(1, int(num_rows * fraction))
    return np.arange(count, dtype=np.int64) * num_rows // count


def _codes(
    project: Project, make_embedder: MakeEmbedder, ranks: Ranks
) -> tuple[Blocks, Callable[[range], Arrays], VectorIndex, NDArray[np.int64]]:
    """Return the blocks to add, the function that computes them, the index, and the added rows."""
    config: RetroPreprocessingConfig = project.config
    file = empty_index_file(project)
    index = read_index(file, config.retro_index_str, num_threads=ranks.num_cores)
    embeddings = ChunkEmbeddings(project, TRAIN, make_embedder)
    if embeddings.embedder.width != index.width:
        raise ConfigError(
            f"{file} is an index of vectors of {index.width}, and the embedder's have "
            f"{embeddings.embedder.width}"
        )
    added = rows_of_fraction(len(embeddings), config.retro_index_add_load_fraction)
    is_plain = config.retro_index_type == "faiss-base"

    def compute(rows: range) -> Arrays:
        vectors = embeddings.of(added[rows.start : rows.stop])
        return {_KEY: vectors if is_plain else index.encode(vectors)}

    blocks = table_blocks(
        index_folder(project) / "add_codes",
        _KEY,
        num_rows=len(added),
        size=config.retro_block_size,
        width=index.width if is_plain else index.code_size,
        dtype=np.float32 if is_plain else np.uint8,
    )
    return blocks, compute, index, added


def _write_index(index: VectorIndex, file: Path) -> None:
    with write_errors_name(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    index.write(file)
    log.info("%s: %d vectors", file, len(index))
