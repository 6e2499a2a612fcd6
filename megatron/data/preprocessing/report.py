"""Quality report of preprocessing: lengths, copies, odd tokens and decoding checks per key."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.common.errors import DataError
from megatron.data.preprocessing.block_encoder import Encoder, EncodingRules
from megatron.data.preprocessing.preprocess_spec import PreprocessSpec, first_documents
from megatron.data.preprocessing.quality import (
    MOST_CHARS,
    SAMPLE_ONE_IN,
    SHORTEST_RUN,
    Lengths,
    Tally,
    hash_documents,
    readable_lengths,
)
from megatron.data.preprocessing.shard_writer import existing_files
from megatron.data.token_files.index_files import pieces_of_file

HUGE_TOKENS = 1_000_000
FIRST_DOCUMENTS = 100  # all decoded again; of later ones, one in SAMPLE_ONE_IN


def key_report(
    folders: Sequence[Path], key: int, tally: Tally, *, itemsize: int, suffix_tokens: int
) -> dict[str, Any]:
    """Return the quality report of the documents of one key.

    Args:
        folders: of the shards, in order.
        suffix_tokens: tokens at the end of every document; one without further tokens is empty.
    """
    lengths = Lengths()
    num_sequences = 0
    for folder in folders:
        for sizes, num_here in document_sizes(folder, key):
            lengths.add(sizes)
            num_sequences += num_here
    repeated = count_repeated(existing_files(folders, key, "hashes"), folders[0])
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


def readable(key: str, report: Mapping[str, Any]) -> list[str]:
    """Return the lines of a summary to print."""
    share = report["repeated_documents"] / max(report["documents"], 1)
    lines = [
        f"{key}: {readable_lengths(report['tokens_per_document'])}",
        f"{key}: documents: empty: {report['empty_documents']} | of a million tokens or more: "
        f"{report['huge_documents']} | copies of another: {report['repeated_documents']} ({share:.1%})",
        f"{key}: unknown or byte tokens: {report['unknown_or_byte_share']:.2%} | another text when "
        f"decoded: {report['changed_by_decoding']} of {report['decoded_again']} tried",
    ]
    if report["longest_runs"]:
        run = report["longest_runs"][0]
        lines.append(
            f"{key}: longest run of one token: {run['tokens']} times {run['token']} in document "
            f"{run['document']} (runs from {SHORTEST_RUN} on are in the report)"
        )
    return lines


def document_sizes(folder: Path, key: int) -> Iterator[tuple[NDArray, int]]:
    """Yield (tokens of documents, number of their sequences) of a shard, in pieces."""
    sizes = (
        piece
        for path in existing_files([folder], key, "sizes")
        for piece in pieces_of_file(path, np.dtype("<i4"))
    )
    all_counts = existing_files([folder], key, "counts")
    if not all_counts:
        for piece in sizes:
            yield piece.astype(np.int64), len(piece)
        return
    held = np.empty(0, np.int64)
    for counts in pieces_of_file(all_counts[0], np.dtype("<i4")):
        needed = int(counts.sum())
        while len(held) < needed:
            held = np.concatenate([held, next(sizes).astype(np.int64)])
        ends = np.cumsum(counts, dtype=np.int64)
        before = np.append(0, np.cumsum(held[:needed]))
        yield before[ends] - before[ends - counts], needed
        held = held[needed:]


def count_repeated(paths: Sequence[Path], scratch: Path, *, bucket_bytes: int = 1 << 26) -> int:
    """Return how many entries of these files of hashes are equal to an earlier one.

    Args:
        scratch: folder for files into which more than `bucket_bytes` are first sorted by value.
    """
    num_bytes = sum(path.stat().st_size for path in paths)
    num_buckets = math.ceil(num_bytes / bucket_bytes)
    if num_buckets <= 1:
        return _count_repeated([np.fromfile(path, "<u8") for path in paths])
    buckets = [scratch / f"bucket-{i}" for i in range(num_buckets)]
    with ExitStack() as stack:
        files = [stack.enter_context(bucket.open("wb")) for bucket in buckets]
        for path in paths:
            for piece in pieces_of_file(path, np.dtype("<u8")):
                bucket_of = piece % np.uint64(num_buckets)
                for i, file in enumerate(files):
                    file.write(piece[bucket_of == i].tobytes())
    repeated = 0
    for bucket in buckets:
        repeated += _count_repeated([np.fromfile(bucket, "<u8")])
        bucket.unlink()
    return repeated


def _count_repeated(arrays: list[NDArray]) -> int:
    hashes = np.concatenate(arrays)
    hashes.sort()
    return int(np.count_nonzero(hashes[1:] == hashes[:-1]))


def retry_first_documents(
    spec: PreprocessSpec, rules: EncodingRules, tallies: Sequence[Tally]
) -> None:
    """Decode the first documents of inputs that can be read twice; count the changed ones by key.

    Documents that the sample by hash contains are counted already. Where documents are selected,
    the first ones may be far apart, and only the sample counts.
    """
    if rules.chats or rules.where:
        return
    documents, num_chars = [], 0
    for texts in islice(first_documents(spec), FIRST_DOCUMENTS):
        num_chars += sum(map(len, texts))
        if num_chars > MOST_CHARS:
            break
        documents.append(texts)
    encoder = spec.make_encoder()
    for tally, texts in zip(tallies, zip(*documents, strict=True), strict=False):
        if rules.prepend_space:
            texts = tuple(" " + text if text else "" for text in texts)
        try:
            _try(encoder, rules, texts, tally)
        except DataError:  # of a bad line, which the conversion itself reports
            for text in texts:
                with suppress(DataError):
                    _try(encoder, rules, [text], tally)


def _try(encoder: Encoder, rules: EncodingRules, texts: Sequence[str], tally: Tally) -> None:
    tokens, lengths = rules.encode(encoder, texts)
    ends = np.cumsum(lengths)
    num_ends = int(rules.end is not None)
    hashes = hash_documents(tokens.astype(rules.dtype), ends)
    is_left = (lengths > num_ends) & (hashes % SAMPLE_ONE_IN != 0)
    for i in np.flatnonzero(is_left).tolist():
        ids = tokens[ends[i] - lengths[i] : ends[i] - num_ends]
        tally.take_decoded(texts[i], encoder.gives_back(ids, texts[i]))
