"""Merge pairs of token files into one, as if their documents had been converted together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.common.atomic_files import temporary_beside
from megatron.common.errors import DataError
from megatron.data.token_files.block_digests import digests_path, write_digests
from megatron.data.token_files.copying import copy_extents, lay_end_to_end
from megatron.data.token_files.index_files import INDEX_WRITERS, IndexContent, pieces_of
from megatron.data.token_files.indexed_dataset import IndexedDataset, infer_format, open_token_files
from megatron.data.token_files.publish import publish_pair, write_errors_name


@dataclass(frozen=True)
class Merged:
    """Counts of a finished merge."""

    prefix: str
    documents: int
    sequences: int
    tokens: int


def merge(prefixes: Sequence[str], output_prefix: str, *, workers: int = 1) -> Merged:
    """Write the documents of all `prefixes`, in this order, to one pair of files.

    The pair appears when it is complete, or not at all; memory does not grow with it.

    Args:
        workers: processes that copy.

    Raises:
        DataError: an input is missing, damaged, of another format or token type than the first,
            or is the output itself; or the output cannot be written.
    """
    return write_merged(*open_all(prefixes, output_prefix), output_prefix, workers=workers)


def write_merged(
    datasets: Sequence[IndexedDataset], dataset_impl: str, output_prefix: str, *, workers: int
) -> Merged:
    """Write the documents of all `datasets`, in this order, to one pair of files.

    Raises:
        DataError: an input differs from its digests, or the output cannot be written.
    """
    bin_path, idx_path = Path(output_prefix + ".bin"), Path(output_prefix + ".idx")
    temporaries = [temporary_beside(each) for each in (bin_path, idx_path, digests_path(bin_path))]
    bin_temporary, idx_temporary, digests_temporary = temporaries
    for dataset in datasets:
        dataset.tokens.verify()
    try:
        extents = lay_end_to_end([dataset.bin_path for dataset in datasets])
        copy_extents(extents, bin_temporary, workers=workers)
        with write_errors_name(digests_path(bin_path)):
            write_digests(bin_temporary, digests_temporary)
        with write_errors_name(idx_path), idx_temporary.open("wb") as file:
            content = merged_content(datasets)
            INDEX_WRITERS[dataset_impl](file, content)
        publish_pair(bin_temporary, idx_temporary, digests_temporary, output_prefix)
    finally:
        for each in temporaries:
            each.unlink(missing_ok=True)
    tokens = sum(len(dataset.tokens) for dataset in datasets)
    return Merged(output_prefix, content.num_documents, content.num_sequences, tokens)


def open_all(prefixes: Sequence[str], output_prefix: str) -> tuple[list[IndexedDataset], str]:
    """Return the pairs, each verified, and their common format.

    Raises:
        DataError: everything that keeps them from being merged.
    """
    problems, found = [], []
    output = Path(output_prefix + ".bin").resolve()
    for prefix in prefixes:
        try:
            dataset_impl = infer_format(prefix)
            dataset = open_token_files(prefix, dataset_impl)
            dataset.verify()
        except DataError as error:
            problems.append(str(error))
            continue
        if dataset.bin_path.resolve() == output:
            problems.append(f"--output-prefix {output_prefix} is one of --datasets; give another")
        found.append((dataset, dataset_impl))
    for dataset, dataset_impl in found[1:]:
        first, first_impl = found[0]
        ours, theirs = kind_of(first, first_impl), kind_of(dataset, dataset_impl)
        if ours != theirs:
            problems.append(
                f"{first.prefix} holds {ours}, but {dataset.prefix} holds {theirs}; only files "
                "of one format and token type can be merged, so convert one of them again"
            )
    if problems:
        raise DataError("\n".join(problems))
    return [dataset for dataset, _ in found], found[0][1]


def kind_of(dataset: IndexedDataset, dataset_impl: str) -> str:
    """Describe the properties that two pairs must have in common."""
    return f"{dataset.dtype.name} tokens in the {dataset_impl} format"


def merged_content(datasets: Sequence[IndexedDataset]) -> IndexContent:
    """Return the concatenated index of `datasets`."""

    def sizes() -> Iterator[NDArray]:
        for dataset in datasets:
            yield from pieces_of(dataset.sizes)

    def document_starts() -> Iterator[NDArray]:
        yield np.zeros(1, "<i8")
        num_before = 0
        for dataset in datasets:
            for piece in pieces_of(dataset.document_starts[1:]):
                yield piece + num_before
            num_before += len(dataset)

    return IndexContent(
        dtype=datasets[0].dtype,
        num_sequences=sum(map(len, datasets)),
        num_documents=sum(len(dataset.document_starts) - 1 for dataset in datasets),
        sizes=sizes,
        document_starts=document_starts,
    )
