"""Recall of an approximate index: how many of the nearest chunks it finds, against a full search."""

import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.common.errors import ConfigError
from megatron.extensions.retro.retrieval.blocks import Ranks
from megatron.extensions.retro.retrieval.chunk_database import TRAIN
from megatron.extensions.retro.retrieval.database_build import VALID
from megatron.extensions.retro.retrieval.flags import (
    RetroPreprocessingConfig,
    RetroRecallConfig,
)
from megatron.extensions.retro.retrieval.index_build import (
    ChunkEmbeddings,
    MakeEmbedder,
    filled_index_file,
)
from megatron.extensions.retro.retrieval.project import Project
from megatron.extensions.retro.retrieval.vector_index import new_index, read_index

_ROUNDING = 1e-5  # of squared distances in float32, relative to the squared length of the query


def measure_recall(
    project: Project, options: RetroRecallConfig, make_embedder: MakeEmbedder, ranks: Ranks
) -> Iterator[str]:
    """Search the index for chunks that are not in it, and all chunks; yield lines with the recall.

    Recall@k is the share of the first k found that are no farther than the k-th nearest of all.

    Raises:
        ConfigError: there are fewer chunks than --recall-at.
        DataError: files are missing or damaged.

    Randomness: numpy.random.Generator(PCG64(--retro-gpt-seed)) draws the chunks that are searched for.
    """
    config: RetroPreprocessingConfig = project.config
    file = filled_index_file(project)
    index = read_index(file, config.retro_index_str, num_threads=ranks.num_cores)
    database = ChunkEmbeddings(project, TRAIN, make_embedder)
    depth = max(options.recall_at)
    if depth > len(database):
        raise ConfigError(f"--recall-at {depth} is more than the {len(database)} chunks of {TRAIN}")
    queries = _queries(project, database, make_embedder, options.recall_queries)
    found, seconds = [], []
    nprobes = options.recall_nprobe or [config.retro_query_nprobe]
    for nprobe in nprobes:
        index.set_search(nprobe=nprobe, ef_search=config.retro_query_ef_search)
        started_at = time.perf_counter()
        found.append(index.search(queries, depth)[1])
        seconds.append(time.perf_counter() - started_at)
    search = FullSearch(queries, depth, found)
    for rows in _ranges(len(database), config.retro_block_size):
        search.add(rows, database.of(np.arange(rows.start, rows.stop)), ranks.num_cores)
    yield (
        f"{file}: chunks: {len(index)} of {len(database)} | bytes: {file.stat().st_size} | "
        f"searched for: {len(queries)}"
    )
    for nprobe, distances, spent_s in zip(nprobes, search.of_found, seconds, strict=True):
        shares = search.recall(distances, options.recall_at)
        words = " | ".join(
            f"recall@{k}: {share:.4f}" for k, share in zip(options.recall_at, shares, strict=True)
        )
        yield f"nprobe: {nprobe} | {words} | ms a search: {1000 * spent_s / len(queries):.3f}"


class FullSearch:
    """The nearest of all vectors, which come in blocks, and the distances of those found otherwise.

    Args:
        found: ids that searches have found for each query; -1 for none.

    Shapes: queries [n, width]; found, each [n, depth].
    """

    def __init__(
        self, queries: NDArray[np.float32], depth: int, found: Sequence[NDArray[np.int64]]
    ):
        self._queries, self._depth, self._found = queries, depth, found
        self._nearest = np.full((len(queries), depth), np.inf, np.float32)
        self.of_found = [np.full(ids.shape, np.inf, np.float32) for ids in found]

    def add(self, rows: range, vectors: NDArray[np.float32], num_threads: int) -> None:
        """Take the vectors of `rows` into account."""
        flat = new_index("Flat", vectors.shape[1], num_threads=num_threads)
        flat.add(vectors, np.arange(len(vectors)))
        distances, ids = flat.search(self._queries, min(self._depth, len(vectors)))
        distances[ids < 0] = np.inf
        both = np.concatenate([self._nearest, distances], axis=1)
        self._nearest = np.sort(both, axis=1)[:, : self._depth]
        for ids, of_found in zip(self._found, self.of_found, strict=True):
            which = np.nonzero((ids >= rows.start) & (ids < rows.stop))
            differences = self._queries[which[0]] - vectors[ids[which] - rows.start]
            of_found[which] = (differences**2).sum(1)

    def recall(self, distances: NDArray[np.float32], depths: Sequence[int]) -> list[float]:
        """Return the recall at each depth, given the distances of the found neighbors."""
        slack = _ROUNDING * (self._queries**2).sum(1)
        return [
            float((distances[:, :k] <= (self._nearest[:, k - 1] + slack)[:, None]).mean())
            for k in depths
        ]


def _queries(
    project: Project, database: ChunkEmbeddings, make_embedder: MakeEmbedder, count: int
) -> NDArray[np.float32]:
    """Return the embeddings of chunks that are not in the index, or, if there are none, of some."""
    config: RetroPreprocessingConfig = project.config
    others = ChunkEmbeddings(project, VALID, make_embedder)
    source = others if len(others) else database
    rng = np.random.Generator(np.random.PCG64(config.retro_gpt_seed))
    count = min(count, len(source))
    return source.of(np.sort(rng.choice(len(source), count, replace=False, shuffle=False)))


def _ranges(size: int, step: int) -> Iterator[range]:
    for start in range(0, size, step):
        yield range(start, min(start + step, size))
