"""Sample indexes kept on disk, so that each is built once and its pages are shared by all ranks.

The name of a file says everything its content depends on. Files appear whole, by a rename, so
any rank may build or read at any time: nobody waits, and two builders write the same bytes.
"""

import hashlib
import logging
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.publish import publish, temporary_beside
from megatron.data.sample_index import Epochs, SampleIndex, build_sample_index
from megatron.errors import DataError

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""Part of every name; raised whenever the same wishes would give other maps."""

_MAPS = tuple(field.name for field in fields(SampleIndex))


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
        directory: where the cache is; when not said, PREFIX-index-cache beside the data, or
            below the home directory where that cannot be written.

    Raises:
        DataError: the index of `dataset` is damaged, or `directory` cannot be written.
    """
    key = _key(dataset.sizes[documents.start : documents.stop], documents, epochs, seq_length, seed)
    places = [Path(directory)] if directory else _default_places(dataset.prefix)
    shapes = _shapes(documents, epochs)
    for place in places:
        found = _read(place, key, shapes)
        if found:
            return found
    started_at = time.monotonic()
    dataset.verify()
    index = build_sample_index(dataset.sizes, documents, epochs, seq_length=seq_length, seed=seed)
    log.info(
        f"built the sample index of {dataset.prefix}: {len(documents)} documents, "
        f"{epochs.num_epochs} epochs, {epochs.num_samples} samples, "
        f"{time.monotonic() - started_at:.1f} s"
    )
    problems = []
    for place in places:
        try:
            _write(place, key, index)
        except OSError as error:
            problems.append(f"cannot write the index cache {place}: {error.strerror or error}")
        else:
            return _read(place, key, shapes) or index
    if directory:
        raise DataError("; ".join(problems))
    log.warning("%s; the sample index stays in memory", "; ".join(problems))
    return index


def _default_places(prefix: str) -> list[Path]:
    return [Path(f"{prefix}-index-cache"), Path.home() / ".cache" / "megatron" / "index-cache"]


def _key(sizes: NDArray, documents: range, epochs: Epochs, seq_length: int, seed: int) -> str:
    """Hash the documents' sizes, not their path or date: a copied corpus keeps its index."""
    wishes = f"{FORMAT_VERSION} {documents} {epochs} {seq_length} {seed}"
    digest = hashlib.blake2b(wishes.encode(), digest_size=16)
    digest.update(np.ascontiguousarray(sizes, dtype="<i4").data)
    return digest.hexdigest()


def _shapes(documents: range, epochs: Epochs) -> dict[str, tuple[int, ...]]:
    return {
        "document_order": (epochs.num_epochs * len(documents),),
        "sample_starts": (epochs.num_samples + 1, 2),
        "sample_order": (epochs.num_samples,),
    }


def _path(place: Path, key: str, name: str) -> Path:
    return place / f"{key}-{name}.npy"


def _read(place: Path, key: str, shapes: dict[str, tuple[int, ...]]) -> SampleIndex | None:
    """Map the files; None when one is missing or damaged."""
    maps = {}
    for name, shape in shapes.items():
        path = _path(place, key, name)
        try:
            found = np.load(path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, EOFError) as error:
            log.warning("%s cannot be used (%s); it is built again", path, error)
            return None
        if found.shape != shape or found.dtype.kind not in "iu":
            log.warning("%s has shape %s, expected %s; it is built again", path, found.shape, shape)
            return None
        maps[name] = np.asarray(found)
    return SampleIndex(**maps)


def _write(place: Path, key: str, index: SampleIndex) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for name in _MAPS:
        path = _path(place, key, name)
        temporary = temporary_beside(path)
        try:
            with temporary.open("wb") as file:
                np.save(file, getattr(index, name), allow_pickle=False)
            publish(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
