"""Distributed deduplication of a corpus: candidate pairs by MinHash bands, their proof, the first of each group.

Groups are connected components of similar pairs, by passes over sorted files.

Source: Kiveris et al., Connected Components in MapReduce and Beyond, 2014 (large-star, small-star).
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron.extensions.corpora.cleaning.duplicates import (
    BAND,
    PAIR,
    ComparePairs,
    first_pairs,
    most_differences,
    split_blocks,
)
from megatron.extensions.corpora.cleaning.external_sort import (
    ExternalSorter,
    file_blocks,
    merged_blocks,
    open_runs,
    unique_blocks,
    with_firsts,
    write_blocks,
)
from megatron.extensions.corpora.cleaning.fingerprints import Source, document_ids
from megatron.extensions.corpora.cleaning.records import TEXT_KEY, Line, read_lines
from megatron.extensions.corpora.corpus.spec import CorpusSpec

# Pairs by their second document: many copies of one document then lie in the files of many tasks.
BY_OTHER = np.dtype([("other", "<u8"), ("main", "<u8")])
_REMOVED = np.dtype([("document", "<u8")])


def find_candidates(spec: CorpusSpec, task: int) -> None:
    """Write the pairs of documents that agree in a band, for one range of the keys of bands."""
    low, high = ((part << 64) // spec.tasks for part in (task, task + 1))
    path = spec.file("candidates", task, "bin")
    with (
        open_runs(spec.files("bands", "bin"), BAND, low, high) as runs,
        TemporaryFile(dir=spec.folder) as scratch,
    ):
        sorter = ExternalSorter(scratch, BY_OTHER)
        most = most_differences(float(spec.similarity or 0), spec.num_seeds)
        for pairs in first_pairs(merged_blocks(runs), most):
            sorter.add(pairs[["other", "main"]].astype(BY_OTHER))
        write_blocks(path, unique_blocks(sorter.blocks()))


def compare_candidates(spec: CorpusSpec, task: int) -> None:
    """Write the similar ones of the candidate pairs whose second document is of `task`."""
    low, high = _range_of(task)
    texts = spec.files("filtered", "jsonl")
    sources = tuple(Source(str(path), TEXT_KEY, 0) for path in texts)
    compare = ComparePairs(sources, threshold=float(spec.similarity or 0))
    with open_runs(spec.files("candidates", "bin"), BY_OTHER, low, high) as runs:
        similar = map(compare, split_blocks(unique_blocks(merged_blocks(runs))))
        pairs = (pairs[["main", "other"]].astype(PAIR) for pairs in similar)
        write_blocks(spec.file("similar", task, "bin"), pairs)


def find_removed(spec: CorpusSpec, _: int) -> None:
    """Write which documents to remove: all of a group of similar ones but the first."""
    blocks = file_blocks(spec.files("similar", "bin"), PAIR)
    pairs = (block[["other", "main"]].astype(BY_OTHER) for block in blocks)
    removed = first_documents(pairs, spec.folder)
    write_blocks(_removed_file(spec), (block["other"] for block in removed))


def unique_lines(spec: CorpusSpec, task: int) -> Iterator[Line]:
    """Yield the filtered documents of `task` that no earlier one is similar to."""
    removed: set[int] = set()
    if spec.similarity is not None:
        low, high = _range_of(task)
        with open_runs([_removed_file(spec)], _REMOVED, low, high) as (run,):
            removed = {document - low for (document,) in run.read(run.stop).tolist()}
    for line in read_lines([str(spec.file("filtered", task, "jsonl"))]):
        if line.offset not in removed:
            yield line


def _range_of(task: int) -> tuple[int, int]:
    """Return the first number of a document of `task`, and of the next task."""
    low, high = document_ids(np.array([task, task + 1]), np.zeros(2, "u8")).tolist()
    return low, high


def _removed_file(spec: CorpusSpec) -> Path:
    return spec.file("removed", 0, "bin")


def first_documents(pairs: Iterable[NDArray], folder: Path, **sizes: int) -> Iterator[NDArray]:
    """Yield each document of a connected group but the first, sorted, with the first as its main.

    Passes go on until each document is linked to the first of its group alone. Their number grows
    with the logarithm of the length of the chains of pairs; memory is an external sort's.

    Args:
        pairs: records of BY_OTHER in any order, main before other.
        folder: for temporary files.
        sizes: see `ExternalSorter`.
    """
    with TemporaryFile(dir=folder) as one, TemporaryFile(dir=folder) as other:
        links = _sort(pairs, one, sizes)
        while True:
            passes = _Passes()
            links = _sort(passes.to_earlier(links), other, sizes)
            links = _sort(passes.to_later(links), one, sizes)
            if not passes.has_changed:
                break
        yield from links


class _Passes:
    """Passes over links, which are pairs sorted by `other`; they replace each link by one nearer."""

    has_changed = False

    def to_earlier(self, links: Iterable[NDArray]) -> Iterator[NDArray]:
        """Link the earlier neighbors of each document to the first of them; yield both directions."""
        for records, firsts in with_firsts(links):
            is_first = records["main"] == firsts["main"]
            self.has_changed |= not is_first.all()
            linked = np.where(is_first, records["other"], records["main"])
            yield _links(linked, firsts["main"])
            yield _links(firsts["main"], linked)

    def to_later(self, links: Iterable[NDArray]) -> Iterator[NDArray]:
        """Link the later neighbors of each document to the first neighbor, or else to it.

        Args:
            links: in both directions.
        """
        for records, firsts in with_firsts(links):
            is_later = records["main"] > records["other"]
            later, first = records[is_later], firsts["main"][is_later]
            self.has_changed |= bool((first < later["other"]).any())
            yield _links(later["main"], np.minimum(first, later["other"]))


def _links(other: NDArray, main: NDArray) -> NDArray:
    links = np.zeros(len(other), BY_OTHER)
    links["other"], links["main"] = other, main
    return links


def _sort(links: Iterable[NDArray], scratch: BinaryIO, sizes: dict[str, Any]) -> Iterator[NDArray]:
    """Return the links sorted, each once, by way of a file whose content is no longer needed."""
    scratch.seek(0)
    scratch.truncate()
    sorter = ExternalSorter(scratch, BY_OTHER, **sizes)
    for block in links:
        sorter.add(block)
    return unique_blocks(sorter.blocks())
