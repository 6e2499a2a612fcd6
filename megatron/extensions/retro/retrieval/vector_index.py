"""Vector index of Retro, through faiss: training, codes of vectors, search, files."""

import logging
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.common.atomic_files import replacing
from megatron.common.errors import ConfigError, DataError, WrongDataError, needed_for
from megatron.data.token_files.publish import write_errors_name

log = logging.getLogger(__name__)

_BATCH = 1000  # queries of one search, so that its memory is bounded


def import_faiss(num_threads: int) -> ModuleType:
    """Import faiss, with `num_threads` threads: as many as cores are allowed, or they spin.

    Raises:
        ConfigError: it is not installed.
    """
    with needed_for("the index of Retro", "faiss-cpu"):
        faiss = import_module("faiss")
    faiss.omp_set_num_threads(num_threads)
    return faiss


class VectorIndex:
    """Index of vectors, searched for the nearest by their Euclidean distance.

    Args:
        kind: as faiss.index_factory reads it.
        index: of faiss.
    """

    def __init__(self, faiss: ModuleType, kind: str, index: Any):
        self._faiss, self.kind, self._index = faiss, kind, index

    @property
    def width(self) -> int:
        """Features of a vector."""
        return int(self._index.d)

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @property
    def needs_training(self) -> bool:
        """Whether the index is of a kind that has to be trained, and is not yet."""
        return not self._index.is_trained

    def train(self, vectors: NDArray[np.float32]) -> None:
        """Train the index.

        Raises:
            WrongDataError: these are too few vectors.
        """
        try:
            self._index.train(np.ascontiguousarray(vectors))
        except RuntimeError as error:
            raise WrongDataError(
                f"--retro-index-str {self.kind} cannot be trained with {len(vectors)} chunks "
                f"({_first_line(error)}): give an index with fewer lists or codes, or a greater "
                "--retro-index-ntrain"
            ) from error

    @property
    def code_size(self) -> int:
        """Bytes of the code of a vector.

        Raises:
            ConfigError: the index has no codes that can be made apart from it.
        """
        try:
            return int(self._index.sa_code_size())
        except RuntimeError as error:
            raise ConfigError(
                f"--retro-index-type faiss-par-add: an index {self.kind} has no codes of its own "
                f"({_first_line(error)}); give --retro-index-type faiss-base"
            ) from error

    def encode(self, vectors: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Return the codes of vectors. Shapes: [n, width] -> [n, code_size]."""
        if not len(vectors):
            return np.empty((0, self.code_size), np.uint8)
        return self._index.sa_encode(np.ascontiguousarray(vectors))

    def add_codes(self, codes: NDArray[np.uint8], ids: NDArray[np.int64]) -> None:
        """Add vectors by their codes, under their ids. Shapes: codes [n, code_size], ids [n]."""
        lists = self._lists()
        codes = np.ascontiguousarray(codes)
        if lists is None:
            # Without lists, a vector's id is its position.
            self._require_positions(ids)
            self._index.add_sa_codes(codes)
            return
        lists.add_sa_codes(codes, np.ascontiguousarray(ids))
        self._index.ntotal = lists.ntotal

    def add(self, vectors: NDArray[np.float32], ids: NDArray[np.int64]) -> None:
        """Add vectors under their ids. Shapes: vectors [n, width], ids [n]."""
        vectors = np.ascontiguousarray(vectors)
        if self._lists() is None:
            self._require_positions(ids)
            self._index.add(vectors)
            return
        self._index.add_with_ids(vectors, np.ascontiguousarray(ids))

    def search(
        self, vectors: NDArray[np.float32], num_neighbors: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return distances and ids of the nearest, nearest first; -1 where there are fewer.

        Shapes: [n, width] -> [n, num_neighbors] twice.
        """
        distances = np.empty((len(vectors), num_neighbors), np.float32)
        ids = np.empty((len(vectors), num_neighbors), np.int64)
        for first in range(0, len(vectors), _BATCH):
            batch = slice(first, first + _BATCH)
            found = self._index.search(np.ascontiguousarray(vectors[batch]), num_neighbors)
            distances[batch], ids[batch] = found
        return distances, ids

    def set_search(self, *, nprobe: int, ef_search: int) -> None:
        """Set how much of the index a search looks at, where the index has such a parameter."""
        space = self._faiss.ParameterSpace()
        for name, value in (("nprobe", nprobe), ("efSearch", ef_search)):
            with suppress(RuntimeError):  # an index without lists, or without an HNSW graph
                space.set_index_parameter(self._index, name, value)

    def write(self, file: Path) -> None:
        """Write the index to a file, which appears complete or not at all.

        Raises:
            DataError: it cannot be written.
        """
        with write_errors_name(file), replacing(file) as temporary:
            try:
                self._faiss.write_index(self._index, str(temporary))
            except RuntimeError as error:
                raise DataError(f"cannot write {file}: {_first_line(error)}") from error

    def _lists(self) -> Any:
        """Return the inverted lists of the index; None if it has none."""
        inner = self._faiss.downcast_index(self._index)
        if isinstance(inner, self._faiss.IndexPreTransform):
            inner = self._faiss.downcast_index(inner.index)
        return inner if isinstance(inner, self._faiss.IndexIVF) else None

    def _require_positions(self, ids: NDArray[np.int64]) -> None:
        if not np.array_equal(ids, np.arange(len(self), len(self) + len(ids))):
            raise ConfigError(
                f"--retro-index-add-load-fraction: an index {self.kind} has no lists, and holds all "
                "chunks or none: leave the flag out"
            )


def new_index(kind: str, width: int, *, num_threads: int) -> VectorIndex:
    """Return an index without vectors.

    Raises:
        ConfigError: there is no such kind of index for this width.
        WrongDataError: faiss is not installed.
    """
    faiss = import_faiss(num_threads)
    try:
        return VectorIndex(faiss, kind, faiss.index_factory(width, kind))
    except RuntimeError as error:
        raise ConfigError(
            f"--retro-index-str {kind} is no index of faiss for vectors of {width}"
        ) from error


def read_index(file: Path, kind: str, *, num_threads: int) -> VectorIndex:
    """Read an index from a file.

    Raises:
        DataError: it is missing or damaged.
        WrongDataError: faiss is not installed.
    """
    faiss = import_faiss(num_threads)
    if not file.is_file():
        raise DataError(f"there is no index {file}: run the task that makes it first")
    try:
        return VectorIndex(faiss, kind, faiss.read_index(str(file)))
    except (RuntimeError, MemoryError) as error:
        raise DataError(
            f"{file} cannot be read: {_first_line(error)}; delete it and run its task again"
        ) from error


def _first_line(error: Exception) -> str:
    """Return the cause in a message of faiss, without its place in the source of faiss."""
    return str(error).strip().splitlines()[-1].rpartition(": Error: ")[2]
