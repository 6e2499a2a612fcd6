"""Index maps kept on disk, so that each is built once for all ranks.

The name of a file is a hash of everything its content depends on. Files appear by an atomic rename, so
any rank may build or read at any time, and two builders write the same bytes.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_hexdigest

from megatron.common.atomic_files import open_regular, replacing, require_regular
from megatron.common.errors import DataError
from megatron.data.sampling.index_map import BLOCK_ROWS, IndexMap, IndexMapFile, digests_of
from megatron.data.sampling.index_size import (
    MapRoom,
    lack_of_disk,
    require_memory,
    sample_index_room,
)
from megatron.data.sampling.sample_index import Epochs, SampleIndex, build_sample_index
from megatron.data.token_files.indexed_dataset import IndexedDataset

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""Part of every name; raised whenever the same settings would give other maps."""

_MANY = 10_000_000  # documents and samples that are shuffled for seconds
_CHUNK = 1 << 20  # sizes looked at in one go
_MOST_TOKENS = np.iinfo(np.int32).max  # of a sequence


@dataclass(frozen=True)
class Sizes:
    """Statistics of document sizes that an index map needs before it is built."""

    num_tokens: int
    digest: str


def cached_sample_index(
    dataset: IndexedDataset,
    documents: range,
    epochs: Epochs,
    *,
    seq_length: int,
    seed: int,
    directory: str | Path | None = None,
) -> SampleIndex:
    """Return the sample index from the cache; build it, and put it there, if it is missing.

    Args:
        directory: where the cache is; see `cached_maps`.

    Raises:
        DataError: the index of `dataset` is damaged, or `directory` cannot be written.
    """

    rules = {"seq_length": seq_length, "seed": seed}

    def build() -> dict[str, NDArray]:
        started_at = time.monotonic()
        if len(documents) * epochs.num_epochs + epochs.num_samples > _MANY:
            log.info(
                f"building the sample index of {dataset.prefix}: shuffling of {len(documents)} "
                f"documents in {epochs.num_epochs} epochs, and of {epochs.num_samples} samples, comes "
                "first"
            )
        index = build_sample_index(dataset.sizes, documents, epochs, **rules)
        log.info(
            f"built the sample index of {dataset.prefix}: {len(documents)} documents, "
            f"{epochs.num_epochs} epochs, {epochs.num_samples} samples, "
            f"{time.monotonic() - started_at:.1f} s"
        )
        return dict(vars(index))

    # The documents' sizes, not their path or date: a copied corpus keeps its index.
    sizes = cached_sizes(dataset, documents, directory=directory)
    maps = cached_maps(
        " ".join(map(str, (documents, epochs, *rules.values(), sizes.digest))),
        {
            "document_order": (epochs.num_epochs * len(documents),),
            "sample_starts": (epochs.num_samples + 1, 2),
            "sample_order": (epochs.num_samples,),
        },
        build,
        sample_index_room(dataset.prefix, len(documents), epochs, last_document=documents.stop),
        prefix=dataset.prefix,
        directory=directory,
    )
    return SampleIndex(**maps)


def cached_maps(
    settings: str,
    shapes: Mapping[str, tuple[int | None, ...]],
    build: Callable[[], dict[str, NDArray]],
    room: MapRoom,
    *,
    prefix: str,
    directory: str | Path | None,
) -> Mapping[str, IndexMap]:
    """Return arrays of integers from the cache; build them, and put them there, if one is missing.

    Args:
        settings: everything that the content of the arrays depends on.
        shapes: of the arrays, by name; None where it is known only after building.
        room: memory and disk space for building and keeping them.
        directory: where the cache is; default: PREFIX-index-cache next to the data, or
            below the home directory where that cannot be written.

    Raises:
        DataError: memory is too small to build them, or `directory` to keep them or cannot be
            written.
    """
    key = _hash(settings)
    folders = _folders(prefix, directory)
    for folder in folders:
        if found := _read(folder, key, shapes):
            return found
    require_memory(room)
    lacks = {folder: lack_of_disk(room, folder) for folder in folders}
    if directory and lacks[folders[0]]:
        raise DataError(f"--data-cache-path: {lacks[folders[0]]}; give a folder with more room")
    maps = build()
    problems = [each for each in lacks.values() if each]
    for folder in (folder for folder in folders if not lacks[folder]):
        try:
            for name, values in maps.items():
                path = _path(folder, key, name)
                _write(path, partial(np.save, arr=values, allow_pickle=False))
                digests = digests_of(np.ascontiguousarray(values))
                _write(_digests_path(path), partial(_write_bytes, digests.tobytes()))
        except OSError as error:
            problems.append(f"cannot write the index cache {folder}: {error.strerror or error}")
        else:
            return _read(folder, key, shapes) or maps
    if directory:
        raise DataError(f"--data-cache-path: {'; '.join(problems)}; give a folder to write to")
    log.warning("%s; the index maps stay in memory", "; ".join(problems))
    return maps


def cached_sizes(
    dataset: IndexedDataset, documents: range, *, directory: str | Path | None = None
) -> Sizes:
    """Return the sum and the hash of the sizes of `documents`, of an index that is verified.

    Verifying takes longer than anything else that a cached index map needs. So the result is kept,
    under the hash of the full .idx: a record belongs to an index that was found to be sound, and
    to no other byte. Every start reads the .idx once to compute that hash.

    Raises:
        DataError: a pointer, a size or a start of a document is damaged, or a sequence, of the
            format with room for it, is too long for index maps.
    """
    key = _hash(f"{dataset.index_digest} {documents}")
    files = [folder / f"{key}-sizes.json" for folder in _folders(dataset.prefix, directory)]
    for path in files:
        if sizes := _read_sizes(path):
            return sizes
    dataset.verify()
    try:
        sizes = _measure(dataset.sizes[documents.start : documents.stop])
    except OverflowError as error:
        raise DataError(
            f"{dataset.idx_path}: {error}; index maps have room for {_MOST_TOKENS}, so cut it up "
            "into several"
        ) from error
    content = json.dumps({**asdict(sizes), "check": _check_of(sizes)}).encode()
    for path in files:
        try:
            _write(path, partial(_write_bytes, content))
        except OSError:
            continue  # writing the maps reports the reason
        break
    return sizes


def _read_sizes(path: Path) -> Sizes | None:
    """Return a record of sizes; None if it was never kept, or is damaged."""
    try:
        with open_regular(path) as stream:
            record = json.loads(stream.read())
        sizes = Sizes(record["num_tokens"], record["digest"])
        return sizes if record["check"] == _check_of(sizes) else None
    except (OSError, ValueError, TypeError, LookupError):
        return None


def _check_of(sizes: Sizes) -> str:
    return xxh3_64_hexdigest(f"{sizes.num_tokens} {sizes.digest}".encode())


def _measure(sizes: NDArray) -> Sizes:
    digest, num_tokens = hashlib.blake2b(digest_size=16), 0
    for first in range(0, len(sizes), _CHUNK):
        chunk = sizes[first : first + _CHUNK]
        if chunk.max() > _MOST_TOKENS:
            raise OverflowError(f"a sequence has {chunk.max()} tokens")
        chunk = np.ascontiguousarray(chunk, dtype="<i4")
        digest.update(chunk.data)
        num_tokens += int(chunk.sum(dtype=np.int64))
    return Sizes(num_tokens, digest.hexdigest())


def _hash(settings: str) -> str:
    return hashlib.blake2b(f"{FORMAT_VERSION} {settings}".encode(), digest_size=16).hexdigest()


def _folders(prefix: str, directory: str | Path | None) -> list[Path]:
    if directory:
        return [Path(directory)]
    return [Path(f"{prefix}-index-cache"), Path.home() / ".cache" / "megatron" / "index-cache"]


def _path(folder: Path, key: str, name: str) -> Path:
    return folder / f"{key}-{name}.npy"


def _digests_path(path: Path) -> Path:
    return path.with_suffix(".xxh3")


def _read(
    folder: Path, key: str, shapes: Mapping[str, tuple[int | None, ...]]
) -> dict[str, IndexMap] | None:
    """Open the files; None when one is missing or damaged. Their content is checked when used."""
    maps: dict[str, IndexMap] = {}
    for name, shape in shapes.items():
        path = _path(folder, key, name)
        try:
            require_regular(path)
            require_regular(_digests_path(path))
            # Mapped for its header alone: reads past the end of a truncated file raise SIGBUS.
            found = np.load(path, mmap_mode="r", allow_pickle=False)
            digests = np.fromfile(_digests_path(path), "<u8")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, EOFError) as error:
            log.warning("%s cannot be used (%s); it is built again", path, error)
            return None
        fits = len(found.shape) == len(shape) and all(
            want in (None, have) for have, want in zip(found.shape, shape, strict=True)
        )
        is_plain = found.dtype.kind in "iu" and found.dtype.isnative and found.flags.c_contiguous
        if not fits or not is_plain:
            log.warning("%s has shape %s, expected %s; it is built again", path, found.shape, shape)
            return None
        if len(digests) != -(-len(found) // BLOCK_ROWS):
            log.warning("%s does not belong to %s; it is built again", _digests_path(path), path)
            return None
        maps[name] = IndexMapFile(
            path, digests, dtype=found.dtype, shape=found.shape, offset=found.offset
        )
    return maps


def _write_bytes(content: bytes, file: BinaryIO) -> None:
    file.write(content)


def _write(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, temporary.open("wb") as file:
        write(file)
