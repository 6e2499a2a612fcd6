"""Fingerprints of documents (MinHash), and their texts by file and offset."""

import itertools
import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron.common.atomic_files import replacing
from megatron.common.errors import ConfigError, DataError, needed_for
from megatron.common.process_pool import ordered_map
from megatron.common.remote_files import is_url, open_input, size_of_input
from megatron.data.token_files.publish import write_errors_name
from megatron.extensions.corpora.cleaning.records import (
    TEXT_KEY,
    Line,
    batches,
    read_errors_name,
    read_lines,
)

SHINGLE = 5  # characters
SEED = 1234  # of the hash functions

_FORMAT = 1
_SCHEME = "affine32"
_CHUNK_DOCUMENTS = 1 << 14
# Odd numbers without a pattern, one for each character of a shingle.
_FACTORS = np.random.RandomState(SHINGLE).randint(1, 1 << 62, SHINGLE).astype("u8") * 2 + 1
_MIX = np.uint64(0xFF51AFD7ED558CCD)  # of MurmurHash3's 64-bit finalizer


_OFFSET_BITS = 44


@dataclass(frozen=True)
class Source:
    """A file of documents.

    Args:
        key: which value of a document names it.
        bytes: its size when the fingerprints were taken.
    """

    path: str
    key: str
    bytes: int


@dataclass(frozen=True)
class Fingerprints:
    """The fingerprints of all documents of some files, in their order.

    Args:
        entries: arrays of `document_type`: for each document the index of its `source`, its
            `line`, the `offset` of that line, and its `minhash`. They can be read once.
    """

    sources: tuple[Source, ...]
    entries: Iterator[NDArray]


def document_ids(sources: NDArray, offsets: NDArray) -> NDArray:
    """Return numbers that identify documents and sort like them."""
    return sources.astype("u8") << np.uint64(_OFFSET_BITS) | offsets.astype("u8")


def shingles(text: str) -> set[str]:
    """Return all runs of SHINGLE characters of `text`; the full text if it is shorter."""
    last = max(len(text) - SHINGLE, 0)
    return {text[i : i + SHINGLE] for i in range(last + 1)} if text else set()


def minhash(text: str, *, num_seeds: int, seed: int) -> NDArray:
    """Return the least hash of the shingles of `text`, under each of so many hash functions.

    Source: Broder, On the resemblance and containment of documents, 1997.
    """
    template = _template(num_seeds, seed)
    sketch = type(template)(
        num_seeds, seed=seed, permutations=template.permutations, scheme=_SCHEME, hashfunc=int
    )
    if text:
        sketch.update_batch(_shingle_hashes(text))
    return np.asarray(sketch.hashvalues, "u4")


@dataclass(frozen=True)
class TakeFingerprints:
    """Makes the entries of `Fingerprints.documents` for lines of one source."""

    sources: tuple[Source, ...]
    num_seeds: int
    seed: int

    def __call__(self, batch: Sequence[Line]) -> bytes:
        """Return the entries of these lines, as bytes."""
        entries = np.zeros(len(batch), document_type(self.num_seeds))
        indices = {source.path: index for index, source in enumerate(self.sources)}
        for entry, line in zip(entries, batch, strict=True):
            index = indices[line.path]
            record = line.record()
            line.text(record, self.sources[index].key)
            text = line.text(record, TEXT_KEY)
            entry["source"], entry["line"], entry["offset"] = index, line.number, line.offset
            entry["minhash"] = minhash(text, num_seeds=self.num_seeds, seed=self.seed)
        return entries.tobytes()


def document_type(num_seeds: int) -> np.dtype:
    """Return the type of an entry of `Fingerprints.documents`."""
    return np.dtype(
        [("source", "<u4"), ("line", "<u8"), ("offset", "<u8"), ("minhash", "<u4", (num_seeds,))]
    )


def take_fingerprints(
    inputs: Sequence[tuple[str, str]],
    loaded: Sequence[str],
    *,
    num_seeds: int,
    seed: int,
    workers: int,
) -> Fingerprints:
    """Return the fingerprints saved in the files `loaded`, then the fingerprints of `inputs`.

    Args:
        inputs: (path, key) of files of documents.

    Raises:
        ConfigError: a file comes twice.
        DataError: a document is not as expected, or a file was saved with other settings.
    """
    sources: list[Source] = []
    chunks: list[Iterator[NDArray]] = []
    for path in loaded:
        found, entries = _load(path, {"num_seeds": num_seeds, "seed": seed})
        chunks.append(_with_sources_from(len(sources), entries))
        sources += found
    for path, key in inputs:
        with read_errors_name(path):
            name = path if is_url(path) else os.path.abspath(path)
            sources.append(Source(name, key, size_of_input(path)))
    paths = [source.path for source in sources]
    if twice := sorted({path for path in paths if paths.count(path) > 1}):
        raise ConfigError(*(f"{path} comes twice among the inputs" for path in twice))
    take = TakeFingerprints(tuple(sources), num_seeds, seed)
    lines = read_lines(source.path for source in sources[len(sources) - len(inputs) :])
    dtype = document_type(num_seeds)
    chunks.append(
        np.frombuffer(taken, dtype) for taken in ordered_map(take, batches(lines), workers)
    )
    return Fingerprints(tuple(sources), itertools.chain.from_iterable(chunks))


def _with_sources_from(first: int, chunks: Iterator[NDArray]) -> Iterator[NDArray]:
    for chunk in chunks:
        chunk["source"] += first
        yield chunk


def save(
    entries: BinaryIO, sources: Sequence[Source], path: str, *, num_seeds: int, seed: int
) -> None:
    """Write fingerprints to an .npz file, which holds no code and which numpy reads.

    Args:
        entries: file of all entries.

    Raises:
        DataError: the file cannot be written.
    """
    settings = {
        "format": _FORMAT,
        "shingle": SHINGLE,
        "num_seeds": num_seeds,
        "seed": seed,
        "sources": [asdict(source) for source in sources],
    }
    target = Path(path)
    dtype = document_type(num_seeds)
    shape = (entries.seek(0, os.SEEK_END) // dtype.itemsize,)
    header = {"descr": dtype.descr, "fortran_order": False, "shape": shape}
    entries.seek(0)
    with (
        write_errors_name(target),
        replacing(target) as temporary,
        zipfile.ZipFile(temporary, "x") as archive,
    ):
        with archive.open(zipfile.ZipInfo("settings.npy"), "w") as member:
            np.lib.format.write_array(member, np.array(json.dumps(settings)))
        member_name = zipfile.ZipInfo("documents.npy")
        with archive.open(member_name, "w", force_zip64=True) as member:
            np.lib.format.write_array_header_1_0(member, header)
            shutil.copyfileobj(entries, member)


_LINE_BYTES = 1 << 16  # of one request to a URL for a line


class Texts:
    """The documents of fingerprints, read from their files on access.

    A context manager, since the files stay open.
    """

    def __init__(self, sources: Sequence[Source]):
        self._sources = sources
        self._files: dict[int, BinaryIO] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Texts":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def text(self, document: int) -> str:
        """Return the text of a document, by its number of `document_ids`.

        Raises:
            DataError: the file has changed.
        """
        line, _ = self._line(document)
        return line.text(line.record(), TEXT_KEY)

    def name(self, document: int) -> str:
        """Return the name of a document.

        Raises:
            DataError: the file has changed.
        """
        line, source = self._line(document)
        return line.text(line.record(), source.key)

    def check(self) -> None:
        """Raise DataError if a file has another size than when the fingerprints were taken."""
        for source in self._sources:
            with read_errors_name(source.path):
                size = size_of_input(source.path)
            if size != source.bytes:
                raise DataError(
                    f"{source.path} has {size} bytes and had {source.bytes} when its fingerprints "
                    "were taken; take them again with --inputs"
                )

    def _line(self, document: int) -> tuple[Line, Source]:
        index, offset = document >> _OFFSET_BITS, document & (1 << _OFFSET_BITS) - 1
        source = self._sources[index]
        with read_errors_name(source.path):
            if index not in self._files:
                file = open_input(source.path, _LINE_BYTES)
                self._files[index] = self._stack.enter_context(file)
            self._files[index].seek(offset)
            raw = self._files[index].readline()
        return Line(f"{source.path} from byte {offset}", 1, offset, raw.rstrip(b"\r\n")), source


@lru_cache(maxsize=1)
def _template(num_seeds: int, seed: int) -> Any:
    with needed_for("the search for near duplicates", "datasketch"):
        from datasketch import MinHash
    return MinHash(num_seeds, seed=seed, scheme=_SCHEME)


def _shingle_hashes(text: str) -> NDArray:
    letters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype("u8") + 1
    width = min(len(letters), SHINGLE)
    hashes = np.zeros(len(letters) - width + 1, "u8")
    for i in range(width):
        hashes += letters[i : i + len(hashes)] * _FACTORS[i]
    hashes ^= hashes >> np.uint64(33)
    hashes *= _MIX
    return np.unique(hashes >> np.uint64(32)).astype("u4")


def _load(path: str, settings: dict[str, Any]) -> tuple[list[Source], Iterator[NDArray]]:
    """Return the sources of a saved file, and its entries piece by piece."""
    try:
        with np.load(path, allow_pickle=False) as file:
            saved = json.loads(str(file["settings"]))
        sources = [Source(**source) for source in saved["sources"]]
        is_known = (saved["format"], saved["shingle"]) == (_FORMAT, SHINGLE)
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, EOFError) as error:
        raise DataError(f"--load-fingerprints {path}: not a file of fingerprints") from error
    if not is_known:
        raise DataError(f"--load-fingerprints {path} is of another version of this tool")
    for name, wanted in settings.items():
        if saved[name] != wanted:
            flag = "--" + name.replace("_", "-")
            raise DataError(f"--load-fingerprints {path} is of {flag} {saved[name]}, not {wanted}")
    return sources, _entries(path, document_type(settings["num_seeds"]))


def _entries(path: str, dtype: np.dtype) -> Iterator[NDArray]:
    try:
        with zipfile.ZipFile(path) as archive, archive.open("documents.npy") as member:
            np.lib.format.read_magic(member)
            (count,), _, found = np.lib.format.read_array_header_1_0(member)
            if found != dtype:
                raise ValueError("entries of another type")
            for start in range(0, count, _CHUNK_DOCUMENTS):
                wanted = min(_CHUNK_DOCUMENTS, count - start)
                yield np.frombuffer(bytearray(member.read(wanted * dtype.itemsize)), dtype)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
        raise DataError(f"--load-fingerprints {path} is damaged: {error}") from error
