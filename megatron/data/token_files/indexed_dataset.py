"""Indexed dataset (.bin/.idx): token sequences on disk, in the mmap format or the older one."""

import mmap
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from megatron.common.atomic_files import temporary_beside
from megatron.common.errors import DataError
from megatron.data.token_files.block_digests import digests_path, write_digests
from megatron.data.token_files.disk_file import cannot_open, cut_under_the_reader, file_digest
from megatron.data.token_files.index_files import (
    LEGACY_HEADER,
    LEGACY_MAGIC,
    MMAP_HEADER,
    IndexContent,
    counting,
    dtype_code,
    pieces_of,
    pieces_of_file,
    read_legacy_header,
    read_mmap_header,
    starts_and_ends,
    write_mmap_index,
)
from megatron.data.token_files.pair_files import existing_pair, pair_of, require_length
from megatron.data.token_files.publish import publish_pair, write_errors_name
from megatron.data.token_files.token_file import TokenFile


def best_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest type that preprocessing uses for ids below `vocab_size`."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


class IndexedDataset:
    """Sequences of tokens in PREFIX.bin, found through PREFIX.idx, which is mapped.

    A sequence is a document, unless preprocessing split documents into sentences: then
    sequences `document_starts[k]` to `document_starts[k + 1]` make document k.

    Args:
        prefix: path of the pair without `.bin` and `.idx`.

    Raises:
        DataError: a file is missing, truncated, too long, or of another format.

    Shapes: sizes [sequences] int32, in tokens; pointers [sequences] int64, in bytes;
        document_starts [documents + 1] int64; tokens [tokens], a TokenFile with all sequences
        back to back.
    """

    def __init__(self, prefix: str | Path):
        self.prefix = str(prefix)
        self.bin_path, self.idx_path = existing_pair(self.prefix)
        self.dtype, num_sequences, num_entries = read_mmap_header(self.idx_path)

        index = self._map_index()
        sizes_end = MMAP_HEADER.size + 4 * num_sequences
        self.sizes = np.frombuffer(index, "<i4", num_sequences, MMAP_HEADER.size)
        self.pointers = np.frombuffer(index, "<i8", num_sequences, sizes_end)
        self.document_starts = np.frombuffer(
            index, "<i8", num_entries, sizes_end + 8 * num_sequences
        )

        expected_bytes = 0
        if num_sequences:
            expected_bytes = int(self.pointers[-1]) + int(self.sizes[-1]) * self.dtype.itemsize
        require_length(self.bin_path, expected_bytes)
        self.tokens = TokenFile(self.bin_path, self.dtype)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, i: int) -> NDArray:
        return self.get(i)

    def get(self, i: int, offset: int = 0, length: int | None = None) -> NDArray:
        """Return `length` tokens of sequence i from `offset` on; default: to its end.

        Shapes: -> [length], of the type on disk, read-only.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"sequence {i} of {len(self)} in {self.prefix}")
        size = int(self.sizes[i])
        if length is None:
            length = size - offset
        if not 0 <= offset <= offset + length <= size:
            raise ValueError(
                f"tokens {offset} to {offset + length} of sequence {i} in {self.prefix}, "
                f"which has {size} tokens"
            )
        start = self._start(i) + offset
        return self.tokens[start : start + length]

    def token_starts(self, sequences: NDArray) -> NDArray:
        """Return the start of each of `sequences` in `tokens`. Shapes: [n] -> [n] int64."""
        return self.pointers[sequences] // self.dtype.itemsize

    def require_whole_index(self) -> None:
        """Check that the .idx was not truncated since it was opened: reads past its end are fatal.

        Raises:
            DataError: it was. One that another file has replaced stays as it was opened.
        """
        if (found := self._index.size()) < len(self._index):
            raise cut_under_the_reader(
                self.idx_path, len(self._index), found, "copy it again, and start again"
            )

    def _map_index(self) -> mmap.mmap:
        """Map the .idx, whose length the header has been compared with."""
        try:
            with self.idx_path.open("rb") as file:
                self._index = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise cannot_open(self.idx_path, error) from error
        return self._index

    @cached_property
    def index_digest(self) -> str:
        """XXH3 of 128 bits of the full .idx, read when first needed.

        Raises:
            DataError: the file cannot be read.
        """
        return file_digest(self.idx_path)

    def verify(self) -> None:
        """Check that sequences and documents follow one another without gap or overlap.

        Reads the full index, so call it once per .idx file, not for every opening.

        Raises:
            DataError: a pointer, a size or a start of a document is damaged.
        """
        self._verify_pointers()
        verify_documents(self.idx_path, self.document_starts, len(self))

    def _verify_pointers(self) -> None:
        sizes, first = pieces_of(self.sizes), 0
        for starts, ends in starts_and_ends(sizes):
            pointers = self.pointers[first : first + len(starts)]
            wrong = (starts * self.dtype.itemsize != pointers) | (ends < starts)
            if wrong.any():
                i = int(wrong.argmax())
                raise DataError(
                    f"{self.idx_path} is damaged: sequence {first + i} has size "
                    f"{self.sizes[first + i]} and starts at byte {pointers[i]}, expected "
                    f"{starts[i] * self.dtype.itemsize}; make the file again"
                )
            first += len(starts)

    def _start(self, i: int) -> int:
        """Return the start of sequence i, in tokens."""
        return int(self.pointers[i]) // self.dtype.itemsize


def verify_documents(idx_path: Path, document_starts: NDArray, num_sequences: int) -> None:
    """Raise a DataError unless `document_starts` goes up from 0 to `num_sequences`."""
    previous = 0
    for i, piece in enumerate(pieces_of(document_starts)):
        steps = np.diff(piece, prepend=previous)
        if (steps < 0).any() or (i == 0 and piece[0] != 0):
            previous = -1
            break
        previous = int(piece[-1])
    if previous != num_sequences or not len(document_starts):
        raise DataError(
            f"{idx_path} is damaged: the starts of its documents do not go from 0 to "
            f"{num_sequences}; make the file again"
        )


class LegacyIndexedDataset(IndexedDataset):
    """Sequences of tokens in PREFIX.bin, found through a PREFIX.idx of the older format.

    The index is mapped, so there is no difference between lazy and cached reading.

    Raises:
        DataError: a file is missing, truncated, too long, or of another format.

    Shapes: sizes [sequences] int64; other arrays as in IndexedDataset.
    """

    def __init__(self, prefix: str | Path):
        self.prefix = str(prefix)
        self.bin_path, self.idx_path = existing_pair(self.prefix)
        self.dtype, num_sequences, num_entries = read_legacy_header(self.idx_path)
        index = np.frombuffer(self._map_index(), "<i8", offset=LEGACY_HEADER.size)
        self._offsets = index[num_sequences + 1 : 2 * num_sequences + 2]
        self.sizes = index[2 * num_sequences + 2 : 3 * num_sequences + 2]
        self.document_starts = index[3 * num_sequences + 2 : 3 * num_sequences + 2 + num_entries]
        require_length(self.bin_path, int(self._offsets[-1]) * self.dtype.itemsize)
        self.tokens = TokenFile(self.bin_path, self.dtype)

    @property
    def pointers(self) -> NDArray:  # type: ignore[override]  # an array of the other format
        """Byte at which each sequence starts; computed anew at every use."""
        return self._offsets[:-1] * self.dtype.itemsize

    def token_starts(self, sequences: NDArray) -> NDArray:
        """Return the start of each of `sequences` in `tokens`. Shapes: [n] -> [n] int64."""
        return self._offsets[sequences]

    def _start(self, i: int) -> int:
        return int(self._offsets[i])

    def _verify_pointers(self) -> None:
        first = 0
        for starts, ends in starts_and_ends(pieces_of(self.sizes)):
            offsets = self._offsets[first : first + len(starts) + 1]
            wrong = (offsets[:-1] != starts) | (offsets[1:] != ends) | (ends < starts)
            if wrong.any():
                i = int(wrong.argmax())
                raise DataError(
                    f"{self.idx_path} is damaged: sequence {first + i} has size "
                    f"{self.sizes[first + i]} and lies at tokens {offsets[i]} to "
                    f"{offsets[i + 1]}, expected {starts[i]}; make the file again"
                )
            first += len(starts)


FORMATS: dict[str, type[IndexedDataset]] = {
    "lazy": LegacyIndexedDataset,
    "cached": LegacyIndexedDataset,
    "mmap": IndexedDataset,
}
"""Reader of a format, by the word of `--dataset-impl`."""


def infer_format(prefix: str | Path) -> str:
    """Return "mmap" or "cached", by the first bytes of PREFIX.idx.

    Raises:
        DataError: a file is missing, or the index is of neither format.
    """
    _, idx_path = existing_pair(str(prefix))
    with idx_path.open("rb") as file:
        magic = file.read(len(LEGACY_MAGIC))
    return "cached" if magic == LEGACY_MAGIC else "mmap"


def open_token_files(prefix: str | Path, dataset_impl: str = "infer") -> IndexedDataset:
    """Return the token files at `prefix`, of either format.

    Raises:
        DataError: a file is missing, damaged, of another format than `dataset_impl`, or the disk
            does not let it be read.
    """
    try:
        return FORMATS[infer_format(prefix) if dataset_impl == "infer" else dataset_impl](prefix)
    except OSError as error:
        raise cannot_open(error.filename or f"{prefix}.bin or .idx", error) from error


class IndexedDatasetWriter:
    """Writes a .bin/.idx pair of one sequence per document; memory does not grow with it.

    A context manager: on success the pair is published, and on failure no files are left.

    Args:
        prefix: path of the pair without `.bin` and `.idx`; an existing pair is replaced.
        dtype: an integer type of `DTYPES`.

    Raises:
        DataError: the files cannot be written.
    """

    def __init__(self, prefix: str | Path, dtype: DTypeLike):
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.num_documents = 0
        self.num_tokens = 0
        self.prefix = str(prefix)
        self._bin_path, self._idx_path = pair_of(self.prefix)
        self._bin_temporary = temporary_beside(self._bin_path)
        self._idx_temporary = temporary_beside(self._idx_path)
        self._digests_temporary = temporary_beside(digests_path(self._bin_path))
        self._sizes_temporary = temporary_beside(Path(self.prefix + ".sizes"))
        dtype_code(self.dtype)  # a type without one has no index
        try:
            with write_errors_name(self._bin_path):
                self._bin = self._bin_temporary.open("wb")
            with write_errors_name(self._idx_path):
                self._sizes = self._sizes_temporary.open("wb")
        except DataError:
            self._bin_temporary.unlink(missing_ok=True)
            raise

    def append(self, tokens: ArrayLike, sizes: ArrayLike | None = None) -> None:
        """Append documents.

        Args:
            tokens: the documents back to back.
            sizes: tokens of each document; default: one document.

        Raises:
            DataError: a token does not fit the data type, or a document the format.

        Shapes: tokens [sum of sizes], sizes [documents].
        """
        tokens = np.asarray(tokens)
        sizes = np.asarray([tokens.size] if sizes is None else sizes, dtype=np.int64)
        if sizes.sum() != tokens.size:
            raise ValueError(f"sizes sum to {sizes.sum()}, tokens are {tokens.size}")
        self._require_fit(tokens, self.dtype, "token id")
        self._require_fit(sizes, np.dtype("<i4"), "number of tokens of a document")
        with write_errors_name(self._bin_path):
            self._bin.write(tokens.astype(self.dtype, copy=False).tobytes())
        with write_errors_name(self._idx_path):
            self._sizes.write(sizes.astype("<i4").tobytes())
        self.num_documents += sizes.size
        self.num_tokens += tokens.size

    def __enter__(self) -> "IndexedDatasetWriter":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                self._finish()
                publish_pair(
                    self._bin_temporary, self._idx_temporary, self._digests_temporary, self.prefix
                )
        finally:
            for file in (self._bin, self._sizes):
                with suppress(OSError):  # closing flushes buffers, and the disk may be full
                    file.close()
            for path in (
                self._bin_temporary,
                self._idx_temporary,
                self._digests_temporary,
                self._sizes_temporary,
            ):
                path.unlink(missing_ok=True)

    def _finish(self) -> None:
        """Complete both files under their temporary names."""
        with write_errors_name(self._bin_path):
            self._bin.close()
        with write_errors_name(digests_path(self._bin_path)):
            write_digests(self._bin_temporary, self._digests_temporary)
        content = IndexContent(
            dtype=self.dtype,
            num_sequences=self.num_documents,
            num_documents=self.num_documents,
            sizes=lambda: pieces_of_file(self._sizes_temporary, np.dtype("<i4")),
            document_starts=lambda: counting(self.num_documents + 1),
        )
        with write_errors_name(self._idx_path):
            self._sizes.close()
            with self._idx_temporary.open("wb") as file:
                write_mmap_index(file, content)

    def _require_fit(self, values: NDArray, dtype: np.dtype, what: str) -> None:
        if not values.size or np.can_cast(values.dtype, dtype):
            return
        limits = np.iinfo(dtype)
        for value in (int(values.min()), int(values.max())):
            if not limits.min <= value <= limits.max:
                raise DataError(
                    f"{what} {value} does not fit {dtype.name} in {self._bin_path} "
                    f"({limits.min} to {limits.max})"
                )
