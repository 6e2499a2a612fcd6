"""Joining of shards: the tokens, digests and index of one key, written before they are published."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.common.atomic_files import flush
from megatron.common.errors import DataError
from megatron.data.preprocessing.block_encoder import EncodingRules
from megatron.data.preprocessing.preprocess_spec import PreprocessSpec
from megatron.data.preprocessing.shard_writer import ShardState, existing_files, write_json
from megatron.data.token_files.block_digests import write_digests
from megatron.data.token_files.copying import Extent, copy_extents
from megatron.data.token_files.index_files import (
    INDEX_WRITERS,
    IndexContent,
    counting,
    pieces_of_file,
)
from megatron.data.token_files.publish import write_errors_name

JOINED = ".joined"
"""Added to a key: how many bytes of its tokens are joined."""

_COPYING = 4  # threads; more do not copy faster


def staged_digests(staging: Path, key: int) -> Path:
    """Return the file of the digests of a key's tokens before it is published."""
    return staging / f"{key}.bin.xxh3"


def write_pair(
    spec: PreprocessSpec,
    rules: EncodingRules,
    states: Mapping[str, ShardState],
    key: int,
    documents: int,
) -> list[str]:
    """Write tokens, digests and index of a key; return their paths and the prefix."""
    staging, prefix = spec.staging, spec.prefix_of(rules.keys[key])
    bin_path, idx_path = staging / f"{key}.bin", staging / f"{key}.idx"
    with write_errors_name(Path(prefix + ".bin")):
        workers = min(spec.workers, _COPYING)
        _join_tokens(staging, states, bin_path, workers=workers, batch_bytes=spec.join_bytes)
        write_digests(bin_path, staged_digests(staging, key))
    with write_errors_name(Path(prefix + ".idx")), idx_path.open("wb") as file:
        folders = [staging / name for name in states]
        INDEX_WRITERS[spec.dataset_impl](file, _content(folders, key, rules, documents))
    return [str(bin_path), str(idx_path), prefix]


def _join_tokens(
    staging: Path,
    states: Mapping[str, ShardState],
    target: Path,
    *,
    workers: int,
    batch_bytes: int,
) -> None:
    """Move the tokens of all shards into one file.

    The file of a shard is removed once its tokens are on disk in `target`, so that no disk need
    hold all of them twice. A file next to it records up to which byte that is so, for a run that
    resumes after a kill.
    """
    target.touch()
    record = target.with_suffix(JOINED)
    joined = min(_read_joined(record), target.stat().st_size)
    left, end = [], 0
    for name, state in states.items():
        num_bytes = state.lengths.get(target.name, 0)
        extent = Extent(staging / name / target.name, 0, end, num_bytes)
        end += num_bytes
        if extent.source.exists():
            left.append(extent)
        elif num_bytes and end > joined:
            raise DataError(
                f"tokens of finished shards are missing in {staging}; run without --resume to "
                "convert all again"
            )
    os.truncate(target, end)
    while left:
        batch, num_bytes = [], 0
        while left and num_bytes < batch_bytes:
            batch.append(left.pop(0))
            num_bytes += batch[-1].num_bytes
        copy_extents(batch, target, workers=workers if num_bytes >= batch_bytes else 1)
        flush(target)
        write_json(record, batch[-1].target_offset + batch[-1].num_bytes)
        for each in batch:
            each.source.unlink()


def _read_joined(record: Path) -> int:
    """Return up to which byte the joined tokens are on disk; 0 where nothing is recorded."""
    try:
        return int(record.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return 0


def _content(
    folders: Sequence[Path], key: int, rules: EncodingRules, documents: int
) -> IndexContent:
    all_sizes = existing_files(folders, key, "sizes")

    def sizes() -> Iterator[NDArray]:
        for path in all_sizes:
            yield from pieces_of_file(path, np.dtype("<i4"))

    def document_starts() -> Iterator[NDArray]:
        if not rules.counts_sequences:
            yield from counting(documents + 1)
            return
        end = np.zeros(1, "<i8")
        yield end
        for path in existing_files(folders, key, "counts"):
            for counts in pieces_of_file(path, np.dtype("<i4")):
                ends = end[-1] + np.cumsum(counts, dtype="<i8")
                yield ends
                end = ends

    return IndexContent(
        dtype=rules.dtype,
        num_sequences=sum(path.stat().st_size // 4 for path in all_sizes),
        num_documents=documents,
        sizes=sizes,
        document_starts=document_starts,
    )
