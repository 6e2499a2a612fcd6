"""Distributed cleaning of a corpus: filter, deduplicate and decontaminate by independent tasks.

Each step has a number of tasks, which read what the tasks of earlier steps wrote and write files of
their own, renamed when they are complete. The cleaned documents do not depend on the number of
tasks.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.common.atomic_files import replace_text, replacing
from megatron.common.errors import DataError
from megatron.common.remote_files import state_of_input
from megatron.data.cleaning.duplicates import (
    BAND,
    PAIR,
    ComparePairs,
    band_records,
    first_pairs,
    most_differences,
    split_blocks,
)
from megatron.data.cleaning.evaluations import evaluation_texts
from megatron.data.cleaning.external_sort import (
    ExternalSorter,
    SortedRun,
    merged_blocks,
    unique_blocks,
)
from megatron.data.cleaning.filters import Filter
from megatron.data.cleaning.fingerprints import (
    Source,
    TakeFingerprints,
    document_ids,
    document_type,
)
from megatron.data.cleaning.ngrams import CountNgrams, Cut, CutDocuments, NgramSet, task_ngrams
from megatron.data.cleaning.records import Line, batches, new_files, read_errors_name, read_lines
from megatron.data.preprocessing.shards import plan_shards, shards_of_rank
from megatron.data.readers.inputs import Block, find_sources, read_blocks, read_range
from megatron.data.readers.line_blocks import Limits
from megatron.data.readers.tables import columns_of
from megatron.data.token_files.publish import write_errors_name

TEXT_KEY = "text"
_LIMITS = Limits(block_bytes=1 << 20, line_bytes=1 << 28)
# Pairs by their second document: many copies of one document then lie in the files of many tasks.
_BY_OTHER = np.dtype([("other", "<u8"), ("main", "<u8")])
_REMOVED = np.dtype([("document", "<u8")])


@dataclass(frozen=True, kw_only=True)
class CorpusSpec:
    """What to clean, and how.

    Args:
        inputs: files or globs of JSON lines, plain or compressed, or Parquet.
        folder: for the files of all tasks.
        tasks: of each step.
        filters: what keeps, mends or drops documents, by name and in this order.
        similarity: a document that shares more than this part of its shingles with an earlier one
            is dropped; None keeps duplicates.
        bands: pieces of a fingerprint, one of which must agree for a pair to be compared.
        num_seeds: numbers of a fingerprint.
        evaluations: (name, file) of texts that are cut out of the documents.
        min_words: of a text to look for that is shorter than an n-gram.
        max_words: of an n-gram.
        key_threshold: n-grams that occur so often are common phrases and stay.
        margin: characters that go with an n-gram on each side.
        min_chars: shorter pieces of a document that was cut are dropped.
        max_pieces: a document that is cut into more is dropped.
    """

    inputs: tuple[str, ...]
    folder: Path
    tasks: int
    filters: Mapping[str, Callable[[], Filter]]
    similarity: float | None = 0.7
    bands: int = 20
    num_seeds: int = 100
    seed: int = 1234
    evaluations: tuple[tuple[str, str], ...] = ()
    min_words: int = 8
    max_words: int = 13
    key_threshold: int = 10
    margin: int = 200
    min_chars: int = 200
    max_pieces: int = 10

    def file(self, step: str, task: int, suffix: str) -> Path:
        """Return the path of a file that a task of a step writes."""
        return self.folder / step / f"{task:05d}.{suffix}"

    def files(self, step: str, suffix: str) -> list[Path]:
        """Return the paths of the files of all tasks of a step."""
        return [self.file(step, task, suffix) for task in range(self.tasks)]

    def input_states(self) -> list[list[Any]]:
        """Return the path and size of each input, and what changes when it is written again.

        Raises:
            DataError: one cannot be read.
        """
        return [
            [source.path, source.num_bytes, state_of_input(source.path)]
            for source in find_sources(self.inputs)
        ]

    @cached_property
    def evaluation_ngrams(self) -> list[str]:
        """N-grams of all evaluations, each once."""
        ngrams = (
            ngram
            for name, path in self.evaluations
            for text in evaluation_texts(name, path)
            for ngram in task_ngrams(text, self.min_words, self.max_words)
        )
        return [*dict.fromkeys(ngrams)]


def input_lines(spec: CorpusSpec, task: int) -> Iterator[Line]:
    """Yield the documents of the part of the input that belongs to `task`.

    Raises:
        DataError: an input cannot be read.
    """
    sources = find_sources(spec.inputs)
    total = sum(source.num_bytes for source in sources)
    shards = plan_shards(sources, max(-(-total // spec.tasks), 1))
    for shard in shards_of_rank(shards, task, spec.tasks):
        pieces = [shard.ranges[0][0]] if shard.is_packed else shard.sources()
        number = 0
        for block in read_blocks(pieces, _LIMITS):
            piece = pieces[block.source]
            number = number if block.start > piece.start else 0
            where = f"{piece.path} from {'row' if block.rows else 'byte'} {piece.start}"
            path = where if piece.start else piece.path
            if block.too_long is not None:
                raise DataError(f"{path}: a line has {block.too_long_bytes} bytes; split it")
            for raw in _raw_lines(block):
                number += 1
                if not raw.isspace():
                    yield Line(path, number, 0, raw.rstrip(b"\r\n"))


def _raw_lines(block: Block) -> Iterable[bytes]:
    """Return the lines of a block; the rows of a table as JSON."""
    data = block.data
    if data is None:
        data = read_range(block.path, block.start, block.end)
    if not block.rows:
        return BytesIO(data)
    _, names = columns_of(data, ())
    columns, _ = columns_of(data, names)
    rows = zip(*(columns[name] for name in names), strict=True)
    return (json.dumps(dict(zip(names, row, strict=True)), default=str).encode() for row in rows)


def filter_documents(spec: CorpusSpec, task: int) -> None:
    """Write the documents that the filters keep, and the sorted bands of their fingerprints.

    Raises:
        DataError: a document is not as expected.
    """
    filters = {name: make() for name, make in spec.filters.items()}
    kinds = [f"{what} by {name}" for name in filters for what in ("dropped", "changed")]
    counts: Counter[str] = Counter(dict.fromkeys(["read", *kinds], 0))
    path = str(spec.file("filtered", task, "jsonl"))
    take = TakeFingerprints((Source(path, TEXT_KEY, 0),), spec.num_seeds, spec.seed)
    offset = 0
    with new_files(path) as (output,), TemporaryFile(dir=spec.folder) as scratch:
        sorter = ExternalSorter(scratch, BAND)
        for batch in batches(input_lines(spec, task)):
            counts["read"] += len(batch)
            kept = []
            for line in _filtered(batch, filters, counts):
                kept.append(Line(path, 0, offset, line.raw))
                output.write(line.raw)
                offset += len(line.raw) + 1
            if spec.similarity is not None and kept:
                entries = np.frombuffer(take(kept), document_type(spec.num_seeds)).copy()
                entries["source"] = task
                sorter.add(band_records(entries, spec.bands))
        if spec.similarity is not None:
            _write_blocks(spec.file("bands", task, "bin"), sorter.blocks())
    counts["documents"] = output.lines
    write_counts(spec, "filtered", task, counts)


def _filtered(
    lines: Sequence[Line], filters: Mapping[str, Filter], counts: Counter[str]
) -> Sequence[Line]:
    """Return the lines that all filters keep, mended, and count what each of them does."""
    for name, outcomes_of in filters.items():
        left = []
        for line, outcome in zip(lines, outcomes_of(lines), strict=True):
            if outcome.dropped_by is not None:
                counts[f"dropped by {name}"] += 1
                continue
            counts[f"changed by {name}"] += bool(outcome.changed_by)
            left.append(replace(line, raw=outcome.line))
        lines = left
    if not filters:
        for line in lines:
            line.text(line.record(), TEXT_KEY)
    return lines


def find_candidates(spec: CorpusSpec, task: int) -> None:
    """Write the pairs of documents that agree in a band, for one range of the keys of bands."""
    low, high = ((part << 64) // spec.tasks for part in (task, task + 1))
    path = spec.file("candidates", task, "bin")
    with (
        _open_runs(spec.files("bands", "bin"), BAND, low, high) as runs,
        TemporaryFile(dir=spec.folder) as scratch,
    ):
        sorter = ExternalSorter(scratch, _BY_OTHER)
        most = most_differences(float(spec.similarity or 0), spec.num_seeds)
        for pairs in first_pairs(merged_blocks(runs), most):
            sorter.add(pairs[["other", "main"]].astype(_BY_OTHER))
        _write_blocks(path, unique_blocks(sorter.blocks()))


def compare_candidates(spec: CorpusSpec, task: int) -> None:
    """Write the similar ones of the candidate pairs whose second document is of `task`."""
    low, high = _range_of(task)
    texts = spec.files("filtered", "jsonl")
    sources = tuple(Source(str(path), TEXT_KEY, 0) for path in texts)
    compare = ComparePairs(sources, threshold=float(spec.similarity or 0))
    with _open_runs(spec.files("candidates", "bin"), _BY_OTHER, low, high) as runs:
        similar = map(compare, split_blocks(unique_blocks(merged_blocks(runs))))
        pairs = (pairs[["main", "other"]].astype(PAIR) for pairs in similar)
        _write_blocks(spec.file("similar", task, "bin"), pairs)


def find_removed(spec: CorpusSpec, _: int) -> None:
    """Write which documents to remove: all of a group of similar ones but the first."""
    pairs = [np.fromfile(path, PAIR) for path in spec.files("similar", "bin")]
    _write_blocks(_removed_file(spec), [removed_of_groups(np.concatenate(pairs))])


def removed_of_groups(pairs: NDArray) -> NDArray:
    """Return, sorted, all documents of connected pairs but the first of each connected group."""
    documents, numbers = np.unique(
        np.concatenate([pairs["main"], pairs["other"]]), return_inverse=True
    )
    one, other = np.split(numbers, 2)
    first = np.arange(len(documents))  # the earliest document of its group known for each
    while len(one):
        low, high = np.minimum(first[one], first[other]), np.maximum(first[one], first[other])
        differ = low != high
        one, other = one[differ], other[differ]
        np.minimum.at(first, high[differ], low[differ])
        while (further := first[first]).tobytes() != first.tobytes():
            first = further
    return documents[first != np.arange(len(documents))]


def count_ngrams(spec: CorpusSpec, task: int) -> None:
    """Count the n-grams of the evaluations in the documents that stay."""
    count = CountNgrams(NgramSet(spec.evaluation_ngrams), TEXT_KEY)
    found: Counter[str] = Counter()
    documents = 0
    for batch in batches(_unique_lines(spec, task)):
        found += count(batch)
        documents += len(batch)
    write_counts(spec, "ngrams", task, {"documents": documents, "ngrams": found})


def clean_documents(spec: CorpusSpec, task: int) -> None:
    """Write the documents that stay, without the texts of evaluations."""
    counts: Counter[str] = Counter({"with n-grams": 0, "dropped with n-grams": 0, "unique": 0})
    lines = batches(_unique_lines(spec, task))
    with new_files(spec.file("cleaned", task, "jsonl")) as (output,):
        cut, first = _cutter(spec, task) if spec.evaluations else (_keep, 0)
        for batch in lines:
            for result in cut((first + counts["unique"], batch)):
                counts["with n-grams"] += result.was_cut
                counts["dropped with n-grams"] += not result.pieces
                for piece in result.pieces:
                    output.write(piece)
            counts["unique"] += len(batch)
    counts["documents"] = output.lines
    write_counts(spec, "cleaned", task, counts)


def _keep(numbered: tuple[int, Sequence[Line]]) -> list[Cut]:
    return [Cut((line.raw,)) for line in numbered[1]]


def _cutter(spec: CorpusSpec, task: int) -> tuple[CutDocuments, int]:
    """Return what cuts the rare n-grams, and the number of the first document of `task`."""
    counted = [read_counts(spec, "ngrams", each) for each in range(spec.tasks)]
    found: Counter[str] = Counter()
    for counts in counted:
        found.update(counts["ngrams"])
    rare = [ngram for ngram in spec.evaluation_ngrams if found[ngram] < spec.key_threshold]
    cut = CutDocuments(
        NgramSet(rare),
        TEXT_KEY,
        margin=spec.margin,
        min_chars=spec.min_chars,
        max_pieces=spec.max_pieces,
        prefix="-".join(dict.fromkeys(name for name, _ in spec.evaluations)),
    )
    return cut, sum(counts["documents"] for counts in counted[:task])


def _unique_lines(spec: CorpusSpec, task: int) -> Iterator[Line]:
    """Yield the filtered documents of `task` that no earlier one is similar to."""
    removed: set[int] = set()
    if spec.similarity is not None:
        low, high = _range_of(task)
        with _open_runs([_removed_file(spec)], _REMOVED, low, high) as (run,):
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


def write_counts(spec: CorpusSpec, step: str, task: int, counts: Mapping[str, Any]) -> None:
    """Write the counts of a task."""
    path = spec.file(step, task, "json")
    with write_errors_name(path):
        replace_text(path, json.dumps(counts), is_flushed=True)


def read_counts(spec: CorpusSpec, step: str, task: int) -> dict[str, Any]:
    """Return the counts of a task."""
    path = spec.file(step, task, "json")
    with read_errors_name(path):
        return dict(json.loads(path.read_text(encoding="utf-8")))


@contextmanager
def _open_runs(
    paths: Sequence[Path], dtype: np.dtype, low: int, high: int
) -> Iterator[list[SortedRun]]:
    """Open sorted files, each as the run of its records from `low` to below `high`."""
    with ExitStack() as stack:
        runs = []
        for path in paths:
            with read_errors_name(path):
                file = stack.enter_context(path.open("rb"))
                records = os.fstat(file.fileno()).st_size // dtype.itemsize
            runs.append(SortedRun(file, dtype, 0, records).between(low, high))
        yield runs


def _write_blocks(path: Path, blocks: Iterable[NDArray]) -> None:
    with write_errors_name(path), replacing(path) as temporary, temporary.open("xb") as file:
        for block in blocks:
            file.write(block.tobytes())
