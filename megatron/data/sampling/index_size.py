"""Memory and disk space of index maps, computed from their plan before any of it is allocated."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.common.errors import DataError
from megatron.common.host_memory import available_bytes
from megatron.data.sampling.sample_index import Epochs

_REMEDY = (
    "train for fewer --train-iters or --train-samples, evaluate with fewer --eval-iters, or use "
    "more text"
)


@dataclass(frozen=True)
class MapRoom:
    """Least memory and disk space that index maps need.

    Args:
        of: the data of the maps, with the numbers that determine their size.
    """

    memory_bytes: int  # while they are built, at most at a time
    disk_bytes: int
    of: str


def sample_index_room(
    prefix: str, documents: int, epochs: Epochs, *, last_document: int
) -> MapRoom:
    """Return the memory and disk space that `build_sample_index` needs.

    Args:
        documents: how many there are in an epoch.
        last_document: the one after the last of them, of the corpus.
    """
    num_entries, num_samples = epochs.num_epochs * documents, epochs.num_samples
    order_bytes = num_entries * _int_bytes(last_document)
    starts = 2 * (num_samples + 1) * _int_bytes(num_entries)
    samples = num_samples * (4 if num_samples < np.iinfo(np.uint32).max - 1 else 8)
    # Both orders are shuffled as numbers of 8 bytes, one after the other, and narrowed then.
    memory = max(8 * num_entries, order_bytes + 8 * num_samples, order_bytes + samples + starts)
    return MapRoom(
        memory,
        order_bytes + starts + samples,
        f"{num_samples} samples from {epochs.num_epochs} epochs of the {documents} documents of "
        f"{prefix}",
    )


def blend_room(num_datasets: int, num_samples: int) -> MapRoom:
    """Return the memory and disk space that `blend_order` needs."""
    sources = num_samples * (2 if num_datasets <= np.iinfo(np.int16).max else 4)
    num_bytes = sources + num_samples * _int_bytes(num_samples)
    return MapRoom(num_bytes, num_bytes, f"{num_samples} samples of a blend of {num_datasets}")


def packing_room(prefix: str, noun: str, num_samples: int) -> MapRoom:
    """Return the memory and disk space that `pack` needs if each sample holds a single text.

    A start is a Python integer in a list at first, and then two numbers of 8 bytes.
    """
    return MapRoom(
        num_samples * (40 + 16), num_samples * 16, f"{num_samples} samples of {noun}s of {prefix}"
    )


def sentence_mapping_room(
    prefix: str, num_samples: int, *, documents: int, sentences: int, tokens: int, max_length: int
) -> MapRoom:
    """Return the memory and disk space that `build_sentence_mapping` needs.

    The last epoch is finished, however few of its samples are wanted: about one for each
    `max_length` tokens and one for the rest of each document, and never more than sentences.
    """
    rows = num_samples + min(documents + tokens // max_length, sentences)
    row = 3 * (4 if sentences <= np.iinfo(np.uint32).max else 8)
    # The shuffle has seven arrays of 8 bytes in addition to the rows.
    return MapRoom(
        rows * (row + 56), rows * row, f"{num_samples} samples of the sentences of {prefix}"
    )


def require_memory(room: MapRoom) -> None:
    """Check that the maps can be built here.

    Raises:
        DataError: they need more memory than this host, or this job, has left.
    """
    available = available_bytes()
    if room.memory_bytes > available:
        raise DataError(
            f"the index maps of {room.of} need {_readable(room.memory_bytes)} of memory while they "
            f"are built, and {_readable(available)} are left here; {_REMEDY}, or build them where "
            "there is more memory: tools/build_index.py"
        )


def lack_of_disk(room: MapRoom, folder: Path) -> str:
    """Return why the maps cannot be written to the folder `folder`; an empty text if they can."""
    there = next((each for each in (folder, *folder.parents) if each.is_dir()), Path())
    disk = shutil.disk_usage(there)
    if room.disk_bytes <= disk.free or not disk.total:  # /proc and its like have no size
        return ""
    return (
        f"{folder} has {_readable(disk.free)} free, and the index maps of {room.of} need "
        f"{_readable(room.disk_bytes)}"
    )


def _int_bytes(count: int) -> int:
    return 4 if count <= np.iinfo(np.int32).max else 8


def _readable(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
