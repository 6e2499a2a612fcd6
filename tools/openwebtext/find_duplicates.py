#!/usr/bin/env python
"""Find documents that are nearly the same, by MinHash fingerprints and shingles of 5 characters."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from typing import Literal

from numpy.typing import NDArray

from megatron.common.cli import run_tool
from megatron.common.errors import raise_if_any
from megatron.common.process_pool import num_workers
from megatron.common.remote_files import is_url
from megatron.config.parsing.flags import parse_sections
from megatron.extensions.corpora.cleaning.duplicates import (
    BAND,
    ComparePairs,
    band_records,
    similar_pairs,
)
from megatron.extensions.corpora.cleaning.external_sort import ExternalSorter
from megatron.extensions.corpora.cleaning.fingerprints import (
    SEED,
    Source,
    Texts,
    save,
    take_fingerprints,
)
from megatron.extensions.corpora.cleaning.records import new_files, to_bytes, total_bytes


@dataclass(frozen=True, kw_only=True)
class DuplicatesConfig:
    """Options of the search for near duplicates."""

    inputs: list[str] = field(default_factory=list)
    """Files of documents, each followed by the key that names a document: FILE KEY FILE KEY."""

    load_fingerprints: list[str] = field(default_factory=list)
    """Files that --save-fingerprints wrote; their documents come before documents of --inputs."""

    save_fingerprints: str | None = None
    """File for the fingerprints of all these documents."""

    output: str | None = None
    """File for the pairs found: one object a line, {MAIN: [{OTHER: similarity}, ...]}."""

    jaccard: Literal["union", "min", "max"] = "union"
    """Denominator of the share of common shingles of two documents: the shingles of both (union),
    of the document with fewer (min), or of the one with more (max)."""

    heuristic_iter: int = 1
    """Documents of each bucket that are compared with all others left in it; -1 for as many as
    there are."""

    seed: int = SEED
    """Seed of the hash functions."""

    num_bands: int = 10
    """Pieces of a fingerprint; documents that agree in one are compared."""

    num_seeds: int = 100
    """Hash functions, and so numbers in a fingerprint; a multiple of the bands."""

    jaccard_parallel: bool = False
    """Compare in as many processes as there are cores."""


def main(argv: Sequence[str]) -> None:
    """Search by the flags `argv`, then print the counts."""
    sections = parse_sections(argv, {"duplicates": DuplicatesConfig}, description=__doc__).sections
    config: DuplicatesConfig = sections["duplicates"]
    raise_if_any(problems(config))
    inputs = list(zip(config.inputs[::2], config.inputs[1::2], strict=True))
    fingerprints = take_fingerprints(
        inputs,
        config.load_fingerprints,
        num_seeds=config.num_seeds,
        seed=config.seed,
        # A byte of text costs more here than elsewhere.
        workers=num_workers(4 * total_bytes(path for path, _ in inputs)),
    )
    near = Path(config.output or config.save_fingerprints or "").parent
    with ExitStack() as stack:
        entries, bands, pairs = (
            stack.enter_context(TemporaryFile(dir=near if near.is_dir() else None))
            for _ in range(3)
        )
        sorter = ExternalSorter(bands, BAND)
        num_documents = 0
        for chunk in fingerprints.entries:
            num_documents += len(chunk)
            if config.save_fingerprints is not None:
                entries.write(chunk.tobytes())
            if config.output is not None:
                sorter.add(band_records(chunk, config.num_bands))
        print(f"documents: {num_documents}")
        if config.save_fingerprints is not None:
            settings = {"num_seeds": config.num_seeds, "seed": config.seed}
            save(entries, fingerprints.sources, config.save_fingerprints, **settings)
        if config.output is not None:
            search(fingerprints.sources, sorter.blocks(), pairs, config)


def search(
    sources: tuple[Source, ...],
    bands: Iterator[NDArray],
    scratch: BinaryIO,
    config: DuplicatesConfig,
) -> None:
    """Write the similar pairs, in the order of the documents."""
    compare = ComparePairs(sources, config.jaccard)
    workers = 1
    if config.jaccard_parallel:
        workers = num_workers(sum(source.bytes for source in sources))
    inputs = [source.path for source in sources]
    num_pairs = 0
    with Texts(sources) as texts, new_files(config.output or "", inputs=inputs) as (output,):
        texts.check()
        found = similar_pairs(
            bands, compare, scratch, rounds=config.heuristic_iter, workers=workers
        )
        pairs = chain.from_iterable(block.tolist() for block in found)
        for main, similar in groupby(pairs, key=itemgetter(0)):
            duplicates = [{texts.name(other): similarity} for _, other, similarity in similar]
            num_pairs += len(duplicates)
            output.write(to_bytes({texts.name(main): duplicates}))
    print(f"{config.output}: documents with duplicates: {output.lines} | pairs: {num_pairs}")


def problems(config: DuplicatesConfig) -> list[str]:
    """Return one sentence for each invalid option."""
    found = []
    if len(config.inputs) % 2:
        found.append(f"--inputs {' '.join(config.inputs)}: give a key after each file")
    if not config.inputs and not config.load_fingerprints:
        found.append("no documents: give --inputs or --load-fingerprints")
    if config.output is None and config.save_fingerprints is None:
        found.append("nothing to write: give --output or --save-fingerprints")
    if is_url(config.save_fingerprints):
        found.append(f"--save-fingerprints {config.save_fingerprints}: give a file of this machine")
    if config.heuristic_iter < 1 and config.heuristic_iter != -1:
        found.append(f"--heuristic-iter {config.heuristic_iter}: give 1 or more, or -1 for all")
    if min(config.num_bands, config.num_seeds) < 1 or config.num_seeds % config.num_bands:
        found.append(
            f"--num-seeds {config.num_seeds} is not a multiple of --num-bands {config.num_bands}"
        )
    if not 0 <= config.seed < 1 << 32:
        found.append(f"--seed {config.seed}: give 0 to 2**32 - 1")
    return found


if __name__ == "__main__":
    run_tool(main)
