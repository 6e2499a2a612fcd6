"""What a conversion says about its documents, so that somebody looks at data before training does."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.preprocessing.quality import SHORTEST_RUN, Tally
from megatron.data.preprocessing.shard_writer import key_file
from megatron.data.token_files.index_files import pieces_of_file
from megatron.data.token_files.lengths import Lengths, readable_lengths

HUGE_TOKENS = 1_000_000
_BUCKET_BYTES = 1 << 26  # hashes sorted at a time


def key_report(
    parts: Sequence[Path], key: int, tally: Tally, *, itemsize: int, suffix_tokens: int
) -> dict[str, Any]:
    """Return what there is to say about the documents of one key.

    Args:
        parts: stages, in order.
        suffix_tokens: tokens that every document has at its end; one with no others is empty.
    """
    lengths = Lengths()
    num_sequences = 0
    for part in parts:
        for sizes, num_here in document_sizes(part, key):
            lengths.add(sizes)
            num_sequences += num_here
    repeated = count_repeated([key_file(part, key, "hashes") for part in parts], parts[0])
    documents, tokens = lengths.documents, lengths.tokens
    return {
        "documents": documents,
        "sequences": num_sequences,
        "tokens": tokens,
        "bin_bytes": tokens * itemsize,
        "tokens_per_document": lengths.summary(),
        "empty_documents": lengths.count(0, suffix_tokens),
        "huge_documents": lengths.count(HUGE_TOKENS),
        "repeated_documents": repeated,
        "longest_runs": [
            {"tokens": run.length, "token": run.token, "document": run.document}
            for run in tally.runs
        ],
        "unknown_or_byte_tokens": tally.odd_tokens,
        "unknown_or_byte_share": tally.odd_tokens / tokens if tokens else 0.0,
        "decoded_again": tally.decoded,
        "changed_by_decoding": tally.changed,
        "changed_examples": tally.changed_examples,
    }


def readable(key: str, said: Mapping[str, Any]) -> list[str]:
    """Return the lines of a summary for people."""
    share = said["repeated_documents"] / max(said["documents"], 1)
    lines = [
        f"{key}: {readable_lengths(said['tokens_per_document'])}",
        f"{key}: documents: empty: {said['empty_documents']} | of a million tokens or more: "
        f"{said['huge_documents']} | copies of another: {said['repeated_documents']} ({share:.1%})",
        f"{key}: unknown or byte tokens: {said['unknown_or_byte_share']:.2%} | another text when "
        f"decoded: {said['changed_by_decoding']} of {said['decoded_again']} tried",
    ]
    if said["longest_runs"]:
        run = said["longest_runs"][0]
        lines.append(
            f"{key}: longest run of one token: {run['tokens']} times {run['token']} in document "
            f"{run['document']} (runs from {SHORTEST_RUN} on are in the report)"
        )
    return lines


def document_sizes(part: Path, key: int) -> Iterator[tuple[NDArray, int]]:
    """Yield (tokens of documents, number of their sequences) of a stage, in pieces."""
    sizes = pieces_of_file(key_file(part, key, "sizes"), np.dtype("<i4"))
    if not key_file(part, key, "counts").stat().st_size:
        for piece in sizes:
            yield piece.astype(np.int64), len(piece)
        return
    held = np.empty(0, np.int64)
    for counts in pieces_of_file(key_file(part, key, "counts"), np.dtype("<i4")):
        needed = int(counts.sum())
        while len(held) < needed:
            held = np.concatenate([held, next(sizes).astype(np.int64)])
        ends = np.cumsum(counts, dtype=np.int64)
        before = np.append(0, np.cumsum(held[:needed]))
        yield before[ends] - before[ends - counts], needed
        held = held[needed:]


def count_repeated(paths: Sequence[Path], scratch: Path) -> int:
    """Return how many entries of these files of hashes are equal to an earlier one.

    More than fit a bucket are first sorted into files by their value, in `scratch`.
    """
    num_bytes = sum(path.stat().st_size for path in paths)
    num_buckets = math.ceil(num_bytes / _BUCKET_BYTES)
    if num_buckets <= 1:
        return _repeated([np.fromfile(path, "<u8") for path in paths])
    buckets = [scratch / f"bucket-{i}" for i in range(num_buckets)]
    with ExitStack() as stack:
        files = [stack.enter_context(bucket.open("wb")) for bucket in buckets]
        for path in paths:
            for piece in pieces_of_file(path, np.dtype("<u8")):
                place = piece % np.uint64(num_buckets)
                for i, file in enumerate(files):
                    file.write(piece[place == i].tobytes())
    repeated = 0
    for bucket in buckets:
        repeated += _repeated([np.fromfile(bucket, "<u8")])
        bucket.unlink()
    return repeated


def _repeated(arrays: list[NDArray]) -> int:
    hashes = np.concatenate(arrays)
    hashes.sort()
    return int(np.count_nonzero(hashes[1:] == hashes[:-1]))
