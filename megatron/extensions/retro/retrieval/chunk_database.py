"""Chunk database of Retro: the pieces of documents that neighbors are, in token files."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.common.errors import DataError
from megatron.data.token_files.indexed_dataset import IndexedDataset, open_token_files
from megatron.extensions.retro.retrieval.hdf5_files import read_array

TRAIN = Path("db", "merged", "train.hdf5")
"""The chunks that can be retrieved, from the project directory on."""

INFOS = Path("db", "indexed_dataset_infos.json")
"""The token files of the chunks, from the project directory on."""

COLUMNS = 5  # dataset, document, start, end, length in the tokens of the embedder


class ChunkDatabase:
    """Chunks that can be retrieved: all chunks of a Retro project's training documents.

    Args:
        project: the project directory, with db/merged/train.hdf5, db/indexed_dataset_infos.json and
            the token files in data/.
        chunk_length: most tokens of a chunk.
        num_chunks: chunks of a neighbor: itself and those that follow it in its document.
        pad: the token after its last one.

    Raises:
        DataError: files are missing or damaged.
    """

    def __init__(self, project: Path, *, chunk_length: int, num_chunks: int, pad: int):
        self.file = project / TRAIN
        self._chunks = read_chunks(self.file)
        self._chunk_length, self._num_chunks, self._pad = chunk_length, num_chunks, pad
        self._datasets = open_data(project)

    def __len__(self) -> int:
        return len(self._chunks)

    def retrieve(self, number: int) -> tuple[NDArray, int]:
        """Return the tokens of a chunk and its continuation in its document, and how many are real.

        The number -1 stands for no chunk.

        Raises:
            DataError: there is no such chunk, or not these tokens.

        Shapes: -> ([num_chunks * chunk_length] int64, number of tokens before the padding).
        """
        tokens = np.full(self._num_chunks * self._chunk_length, self._pad, np.int64)
        if number == -1:
            return tokens, 0
        if not 0 <= number < len(self):
            raise DataError(f"there is no chunk {number} in {self.file}, which has {len(self)}")
        dataset, document, start, end = self._chunks[number, :4].tolist()
        last = end
        for other in self._chunks[number + 1 : number + self._num_chunks, :4].tolist():
            # Chunks without a word for the embedder are not in the database.
            if other[:3] != [dataset, document, last]:
                break
            last = other[3]
        length = last - start
        if not 0 < length <= len(tokens) or not 0 <= dataset < len(self._datasets):
            raise DataError(
                f"{self.file}: chunk {number} is tokens {start} to {last} of document {document} of "
                f"data set {dataset}: the file is damaged, or --retro-chunk-length is another one"
            )
        try:
            tokens[:length] = self._datasets[dataset].get(document, start, length)
        except (IndexError, ValueError) as error:
            raise DataError(
                f"{self.file}: chunk {number} is not in the token files: {error}"
            ) from error
        return tokens, length


def read_chunks(file: Path) -> NDArray:
    """Return the chunks in a file of the database.

    Raises:
        DataError: the file is missing or damaged.

    Shapes: -> [chunks, 5]: see COLUMNS.
    """
    return read_array(file, "chunks", columns=COLUMNS)


def open_data(project: Path) -> list[IndexedDataset]:
    """Open the token files of the database, in the order of their numbers in chunks.

    Raises:
        DataError: files are missing or damaged.
    """
    file = project / INFOS
    try:
        infos = json.loads(file.read_text(encoding="utf-8"))
        prefixes = [info["prefix"] for info in infos]
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{file} is not a list of data sets with a prefix each: {error!r}"
        ) from error
    return [open_token_files(project / "data" / prefix) for prefix in prefixes]
