"""Distributed filtering of a corpus: the documents that stay, and their sorted MinHash bands."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from tempfile import TemporaryFile

import numpy as np

from megatron.common.errors import DataError
from megatron.data.preprocessing.shards import plan_shards, shards_of_rank
from megatron.data.readers.inputs import Block, find_sources, read_blocks, read_range
from megatron.data.readers.line_blocks import Limits
from megatron.data.readers.tables import columns_of
from megatron.extensions.corpora.cleaning.duplicates import BAND, band_records
from megatron.extensions.corpora.cleaning.external_sort import ExternalSorter, write_blocks
from megatron.extensions.corpora.cleaning.filters import Filter
from megatron.extensions.corpora.cleaning.fingerprints import (
    SEED,
    Source,
    TakeFingerprints,
    document_type,
)
from megatron.extensions.corpora.cleaning.records import TEXT_KEY, Line, batches, new_files
from megatron.extensions.corpora.corpus.spec import CorpusSpec, write_counts

_LIMITS = Limits(block_bytes=1 << 20, line_bytes=1 << 28)


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
    take = TakeFingerprints((Source(path, TEXT_KEY, 0),), spec.num_seeds, SEED)
    offset = 0
    with new_files(path) as (output,), TemporaryFile(dir=spec.folder) as scratch:
        sorter = ExternalSorter(scratch, BAND)
        for batch in batches(input_lines(spec, task)):
            counts["read"] += len(batch)
            kept = []
            for line in _filter(batch, filters, counts):
                kept.append(Line(path, 0, offset, line.raw))
                output.write(line.raw)
                offset += len(line.raw) + 1
            if spec.similarity is not None and kept:
                entries = np.frombuffer(take(kept), document_type(spec.num_seeds)).copy()
                entries["source"] = task
                sorter.add(band_records(entries, spec.bands))
        if spec.similarity is not None:
            write_blocks(spec.file("bands", task, "bin"), sorter.blocks())
    counts["documents"] = output.lines
    write_counts(spec, "filtered", task, counts)


def _filter(
    lines: Sequence[Line], filters: Mapping[str, Filter], counts: Counter[str]
) -> Sequence[Line]:
    """Return the lines that all filters keep, repaired, and count each filter's effects."""
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
