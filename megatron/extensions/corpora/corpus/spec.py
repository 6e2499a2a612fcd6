"""Distributed cleaning of a corpus: its inputs and options, and the files of its tasks.

Each step has a number of tasks, which read what the tasks of earlier steps wrote and write files of
their own, renamed when they are complete. The cleaned documents do not depend on the number of
tasks.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from megatron.common.atomic_files import replace_text
from megatron.common.remote_files import state_of_input
from megatron.data.readers.inputs import find_sources
from megatron.data.token_files.publish import write_errors_name
from megatron.extensions.corpora.cleaning.evaluations import evaluation_texts
from megatron.extensions.corpora.cleaning.filters import Filter
from megatron.extensions.corpora.cleaning.ngrams import CutRules
from megatron.extensions.corpora.cleaning.records import read_errors_name


@dataclass(frozen=True, kw_only=True)
class CorpusSpec:
    """Inputs and options of a cleaning.

    Args:
        inputs: files or globs of JSON lines, plain or compressed, or Parquet.
        folder: for the files of all tasks.
        tasks: of each step.
        filters: names of the filters that keep, repair or drop documents, in this order.
        similarity: a document that shares more than this part of its shingles with an earlier one
            is dropped; None keeps duplicates.
        bands: pieces of a fingerprint, one of which must agree for a pair to be compared.
        num_seeds: numbers of a fingerprint.
        evaluations: (name, file) of texts that are cut out of the documents.
    """

    inputs: tuple[str, ...]
    folder: Path
    tasks: int
    filters: Mapping[str, Callable[[], Filter]]
    similarity: float | None = 0.7
    bands: int = 20
    num_seeds: int = 100
    evaluations: tuple[tuple[str, str], ...] = ()

    def file(self, step: str, task: int, suffix: str) -> Path:
        """Return the path of a file that a task of a step writes."""
        return self.folder / step / f"{task:05d}.{suffix}"

    def files(self, step: str, suffix: str) -> list[Path]:
        """Return the paths of the files of all tasks of a step."""
        return [self.file(step, task, suffix) for task in range(self.tasks)]

    def input_states(self) -> list[list[Any]]:
        """Return the path and size of each input, and a stamp that changes when it is rewritten.

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
        texts = (evaluation_texts(name, path) for name, path in self.evaluations)
        return CutRules().ngrams_of(chain.from_iterable(texts))


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
