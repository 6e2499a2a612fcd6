"""The older .bin/.idx pair, of `--dataset-impl lazy` and `cached`, read as the mmap format is."""

import difflib
import glob
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.common.errors import DataError, WrongDataError
from megatron.data.token_files.disk_file import cannot_open
from megatron.data.token_files.index_files import (
    DTYPES,
    LEGACY_HEADER,
    LEGACY_MAGIC,
    VERSION,
    pieces_of,
    starts_and_ends,
)
from megatron.data.token_files.indexed_dataset import (
    IndexedDataset,
    existing_pair,
    require_length,
)
from megatron.data.token_files.token_file import TokenFile

_SHOWN = 4  # pairs that a message suggests


class LegacyIndexedDataset(IndexedDataset):
    """Sequences of tokens in PREFIX.bin, found through a PREFIX.idx of the older format.

    The index is mapped, so there is no difference between lazy and cached reading.

    Raises:
        DataError: a file is missing, truncated, too long, or of another format.

    Shapes: sizes [sequences] int64; the others as in IndexedDataset.
    """

    def __init__(self, prefix: str | Path):
        self.prefix = str(prefix)
        self.bin_path, self.idx_path = existing_pair(self.prefix)
        self.dtype, num_sequences, num_entries = _read_header(self.idx_path)
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
    _, idx_path = _pair_or_hint(str(prefix))
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
        _pair_or_hint(str(prefix))
        return FORMATS[infer_format(prefix) if dataset_impl == "infer" else dataset_impl](prefix)
    except OSError as error:
        raise cannot_open(error.filename or f"{prefix}.bin or .idx", error) from error


def _pair_or_hint(prefix: str) -> tuple[Path, Path]:
    """Return the paths of .bin and .idx; the error names similar pairs."""
    try:
        return existing_pair(prefix)
    except WrongDataError as error:
        if found := _pairs_made_of(prefix) or _pairs_named_like(prefix):
            raise WrongDataError(f"{error}; did you mean {' or '.join(found)}?") from error
        raise


def _pairs_made_of(output_prefix: str) -> list[str]:
    """Return the pairs that preprocessing names after `output_prefix`: PREFIX_KEY_document."""
    prefix = output_prefix.removesuffix(".bin").removesuffix(".idx")
    found = [
        path.removesuffix(".idx")
        for level in ("document", "sentence")
        for path in sorted(glob.glob(f"{glob.escape(prefix)}_*_{level}.idx"))
    ]
    return [each for each in found if Path(each + ".bin").is_file()][:_SHOWN]


def _pairs_named_like(prefix: str) -> list[str]:
    """Return the pairs of the same folder that a slip of a few letters made `prefix` of."""
    folder, name = os.path.split(prefix.removesuffix(".bin").removesuffix(".idx"))
    pairs = (path.stem for path in Path(folder).glob("*.idx") if path.with_suffix(".bin").is_file())
    nearest = difflib.get_close_matches(name, sorted(pairs), n=_SHOWN, cutoff=0.8)
    return [os.path.join(folder, each) for each in nearest]


def _read_header(idx_path: Path) -> tuple[np.dtype, int, int]:
    """Return the tokens' type and the numbers of sequences and of document entries."""
    with idx_path.open("rb") as file:
        header = file.read(LEGACY_HEADER.size)
    if header[: len(LEGACY_MAGIC)] != LEGACY_MAGIC[: len(header)]:
        raise DataError(
            f"{idx_path} is not an index of the lazy and cached format: it starts with "
            f"{header[:8]!r}, expected {LEGACY_MAGIC!r}; open it with --dataset-impl mmap"
        )
    if len(header) < LEGACY_HEADER.size:
        raise DataError(
            f"{idx_path} is truncated: {len(header)} of {LEGACY_HEADER.size} header bytes"
        )
    version, code, itemsize, num_sequences, num_sizes, num_entries = LEGACY_HEADER.unpack(header)[
        1:
    ]
    if version != VERSION:
        raise DataError(f"{idx_path} has format version {version}; this code reads {VERSION}")
    if code not in DTYPES or DTYPES[code].itemsize != itemsize:
        raise DataError(
            f"{idx_path} has data type code {code} with {itemsize} bytes a token; known codes "
            "are 1 to 8"
        )
    if num_sizes != num_sequences:
        raise DataError(
            f"{idx_path} holds {num_sizes} dimensions for {num_sequences} sequences; only "
            "sequences of one dimension are token files"
        )
    length = LEGACY_HEADER.size + 8 * (3 * num_sequences + 2 + num_entries)
    require_length(idx_path, length)
    return DTYPES[code], num_sequences, num_entries
