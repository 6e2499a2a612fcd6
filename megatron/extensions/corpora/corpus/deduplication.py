"""Distributed deduplication of a corpus: candidate pairs by MinHash bands, their proof, the first of each group."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np

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
    write_blocks,
)
from megatron.extensions.corpora.cleaning.fingerprints import Source, document_ids
from megatron.extensions.corpora.cleaning.records import TEXT_KEY, Line, read_lines
from megatron.extensions.corpora.corpus.connected import BY_OTHER, first_documents
from megatron.extensions.corpora.corpus.spec import CorpusSpec

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
