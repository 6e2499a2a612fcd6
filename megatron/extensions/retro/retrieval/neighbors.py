"""Neighbors of the samples of a run (query-neighbors): nearest chunks of other documents."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.config.config import ANY_NETWORK, Config
from megatron.config.plan.samples import plan_samples
from megatron.data.datasets.datasets import build_datasets
from megatron.data.sampling.provenance import TracedSource
from megatron.extensions.retro.retrieval.blocks import Arrays, Blocks, Ranks, table_blocks
from megatron.extensions.retro.retrieval.chunk_database import TRAIN, read_chunks
from megatron.extensions.retro.retrieval.database_build import text_of
from megatron.extensions.retro.retrieval.embedders import Embedder
from megatron.extensions.retro.retrieval.flags import RetroPreprocessingConfig
from megatron.extensions.retro.retrieval.index_build import MakeEmbedder, filled_index_file
from megatron.extensions.retro.retrieval.project import Project
from megatron.extensions.retro.retrieval.vector_index import VectorIndex, read_index
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.types.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_KEY = "neighbors"
_BATCH = 1000  # chunks that are searched for together


@dataclass(frozen=True)
class Samples:
    """Samples that training reads, in their order.

    Args:
        count: how many it reads.
    """

    role: str
    dataset: TracedSource
    count: int


def samples_of(project: Project) -> Iterator[Samples]:
    """Yield the samples of training, validation and test, as a run of this project reads them.

    Raises:
        ConfigError: no run could have these settings.
        DataError: token files are damaged, or hold less than one sample for training.
    """
    # Samples do not depend on the network.
    config = Config.of(**ANY_NETWORK, micro_batch_size=1, retro_project_dir=project.directory)
    plan = plan_samples(config, world_size=1)
    sets = build_datasets(plan.data, seq_length=plan.seq_length, seed=plan.training.seed)
    yield Samples("train", sets.train, plan.data.train.num_samples)
    for planned, datasets in ((plan.data.valid, sets.valid), (plan.data.test, sets.test)):
        for each in planned:
            if each.name in datasets:
                yield Samples(each.name, datasets[each.name], each.num_samples)


class NeighborSearch:
    """Search for the neighbors of chunks of samples.

    Args:
        index: of the chunks of the database.
    """

    def __init__(self, project: Project, index: VectorIndex, embedder: Embedder):
        config: RetroPreprocessingConfig = project.config
        self._index, self._embedder = index, embedder
        self._length = config.retro_gpt_seq_length or 0
        self._chunk_length = config.retro_gpt_chunk_length
        self._num_searched = config.retro_query_num_neighbors_query
        self._num_saved = config.retro_query_num_neighbors_save
        self._tokenizer: Tokenizer = build_tokenizer(**project.tokenizer_arguments)
        chunks = read_chunks(project.directory / TRAIN)
        self._documents = _document_keys(chunks[:, 0], chunks[:, 1])
        self._numbers = {dataset.prefix: number for number, dataset in enumerate(project.datasets)}

    @property
    def num_chunks(self) -> int:
        """Chunks of a sample."""
        return self._length // self._chunk_length

    def of(self, samples: Samples, rows: range) -> NDArray[np.int64]:
        """Return the neighbors of chunks, sample by sample.

        Shapes: -> [rows, saved], -1 where there are fewer.
        """
        step = max(1, _BATCH // self.num_chunks) * self.num_chunks
        starts = [rows.start, *range(rows.start // step * step + step, rows.stop, step)]
        stops = [*starts[1:], rows.stop]
        parts = [
            self._batch_neighbors(samples, range(start, stop))
            for start, stop in zip(starts, stops, strict=True)
        ]
        return np.concatenate(parts)

    def _batch_neighbors(self, samples: Samples, rows: range) -> NDArray[np.int64]:
        texts: list[str] = []
        own: list[NDArray] = []
        for number in range(rows.start // self.num_chunks, -(-rows.stop // self.num_chunks)):
            tokens = samples.dataset[number]["tokens"][: self._length]
            for piece in tokens.reshape(self.num_chunks, self._chunk_length):
                texts.append(text_of(piece, self._tokenizer))
            own += [self._documents_of(samples.dataset, number)] * self.num_chunks
        first = rows.start % self.num_chunks
        texts, own = texts[first : first + len(rows)], own[first : first + len(rows)]
        _, found = self._index.search(self._embedder.embed(texts), self._num_searched)
        found[[not text.strip() for text in texts]] = -1
        return np.stack([self._others(*each) for each in zip(found, own, strict=True)])

    def _documents_of(self, dataset: TracedSource, number: int) -> NDArray[np.uint64]:
        """Return the keys of the documents that a sample has tokens of."""
        origin = dataset.origin(number)
        documents = np.array([piece.document for piece in origin.pieces])
        return _document_keys(np.array(self._numbers[origin.prefix]), documents)

    def _others(self, ids: NDArray[np.int64], own_ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the first of the chunks `ids` that are of other documents than a sample's `own_ids`."""
        ids = ids[ids >= 0]
        ids = ids[~np.isin(self._documents[ids], own_ids)][: self._num_saved]
        return np.append(ids, np.full(self._num_saved - len(ids), -1))


def _document_keys(datasets: NDArray, documents: NDArray) -> NDArray[np.uint64]:
    """Return one number for each document of each of the token files."""
    return datasets.astype(np.uint64) << np.uint64(32) | documents.astype(np.uint64)


def query_neighbors(project: Project, make_embedder: MakeEmbedder, ranks: Ranks) -> None:
    """Write the neighbors of all samples, and into config.json where they are.

    Raises:
        DataError: files are missing or damaged, or cannot be written.

    Communication: the first rank waits for the other ranks, through files.
    """
    search = _search(project, make_embedder, ranks)
    names = {}
    for samples in samples_of(project):
        blocks = _blocks(project, samples, search)
        blocks.fill(_compute(search, samples), ranks)
        names[samples.role] = blocks.folder.name
    if ranks.is_first:
        project.write_neighbor_directories(names)


def validate_neighbors(
    project: Project, make_embedder: MakeEmbedder, ranks: Ranks, *, fraction: float
) -> Iterator[str]:
    """Compute a fraction of the neighbors again; yield a line for each kind of samples.

    Raises:
        DataError: a block has other content.
    """
    search = _search(project, make_embedder, ranks)
    for samples in samples_of(project):
        blocks = _blocks(project, samples, search)
        yield blocks.validate(_compute(search, samples), ranks, fraction=fraction)


def _search(project: Project, make_embedder: MakeEmbedder, ranks: Ranks) -> NeighborSearch:
    config: RetroPreprocessingConfig = project.config
    file = filled_index_file(project)
    index = read_index(file, config.retro_index_str, num_threads=ranks.num_cores)
    index.set_search(nprobe=config.retro_query_nprobe, ef_search=config.retro_query_ef_search)
    return NeighborSearch(project, index, make_embedder())


def _compute(search: NeighborSearch, samples: Samples) -> Callable[[range], Arrays]:
    return lambda rows: {_KEY: search.of(samples, rows)}


def _blocks(project: Project, samples: Samples, search: NeighborSearch) -> Blocks:
    config: RetroPreprocessingConfig = project.config
    digest = project.digest(role=samples.role, samples=samples.count, **_search_settings(config))
    return table_blocks(
        project.directory / "query" / f"{samples.role}_{digest}",
        _KEY,
        num_rows=samples.count * search.num_chunks,
        size=config.retro_block_size,
        width=config.retro_query_num_neighbors_save,
        dtype=np.int64,
    )


def _search_settings(config: RetroPreprocessingConfig) -> Mapping[str, object]:
    """Return the settings of a command that neighbors depend on, besides the project's."""
    return {
        "index_type": config.retro_index_type,
        "index_str": config.retro_index_str,
        "train_load_fraction": config.retro_index_train_load_fraction,
        "add_load_fraction": config.retro_index_add_load_fraction,
        "ef_search": config.retro_query_ef_search,
        "nprobe": config.retro_query_nprobe,
        "num_neighbors_query": config.retro_query_num_neighbors_query,
        "num_neighbors_save": config.retro_query_num_neighbors_save,
    }
