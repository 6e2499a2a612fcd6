"""Steps from a raw corpus to token files: clean, tokenize, join; and the report about them."""

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron.common.errors import ConfigError
from megatron.data.preprocessing.preprocess import convert_share, merge_shards
from megatron.data.preprocessing.preprocess_spec import PreprocessSpec
from megatron.data.preprocessing.recipe import corpus_report_of, write_report
from megatron.data.token_files.publish import write_errors_name
from megatron.extensions.corpora.corpus.decontamination import clean_documents, count_ngrams
from megatron.extensions.corpora.corpus.deduplication import (
    compare_candidates,
    find_candidates,
    find_removed,
)
from megatron.extensions.corpora.corpus.filtering import filter_documents
from megatron.extensions.corpora.corpus.spec import CorpusSpec, read_counts


@dataclass(frozen=True)
class Step:
    """A step of the work: a function of the number of a task, and how many tasks it has.

    A step begins when all tasks of the one before are complete.
    """

    name: str
    run: Callable[[int], None]
    tasks: int


def corpus_steps(spec: CorpusSpec, tokens: PreprocessSpec) -> list[Step]:
    """Return the steps that write the cleaned documents and their token files.

    Args:
        tokens: how to tokenize; its inputs are replaced by the cleaned documents.
    """
    cleaned = tuple(str(path) for path in spec.files("cleaned", "jsonl"))
    tokens = replace(tokens, inputs=cleaned, workers=1, resume=True)
    steps: list[tuple[Callable[..., None], tuple[Any, ...], int]]
    steps = [(filter_documents, (spec,), spec.tasks)]
    if spec.similarity is not None:
        steps += [(find_candidates, (spec,), spec.tasks), (compare_candidates, (spec,), spec.tasks)]
        steps += [(find_removed, (spec,), 1)]
    if spec.evaluations:
        steps += [(count_ngrams, (spec,), spec.tasks)]
    steps += [(clean_documents, (spec,), spec.tasks), (tokenize, (spec, tokens), spec.tasks)]
    steps += [(join, (spec, tokens), 1)]
    return [
        Step(f"{number}-{function.__name__}", partial(function, *arguments), tasks)
        for number, (function, arguments, tasks) in enumerate(steps, start=1)
    ]


def make_folders(spec: CorpusSpec) -> None:
    """Make the folders that the tasks write to."""
    for name in ("filtered", "bands", "candidates", "similar", "removed", "ngrams", "cleaned"):
        with write_errors_name(spec.folder):
            (spec.folder / name).mkdir(parents=True, exist_ok=True)


def tokenize(spec: CorpusSpec, tokens: PreprocessSpec, task: int) -> None:
    """Tokenize the share of `task` of the cleaned documents.

    Raises:
        DataError: the tokens cannot be written.
        ConfigError: no document is left.
    """
    if not any(path.stat().st_size for path in spec.files("cleaned", "jsonl")):
        counts = " | ".join(f"{name}: {count}" for name, count in corpus_counts(spec).items())
        raise ConfigError(f"no document is left ({counts})")
    convert_share(tokens, task, spec.tasks)


def join(spec: CorpusSpec, tokens: PreprocessSpec, _: int) -> None:
    """Join the tokens of all tasks, write the report, and remove intermediate files."""
    # A task that was killed after it had published the files finds no shards.
    if tokens.staging.is_dir():
        merge_shards(tokens)
    write_report(corpus_report_of(tokens.output_prefix), {"documents": corpus_counts(spec)})
    for step in ("bands", "candidates", "similar", "removed"):
        shutil.rmtree(spec.folder / step, ignore_errors=True)
    for path in spec.files("filtered", "jsonl"):
        path.unlink(missing_ok=True)


def corpus_counts(spec: CorpusSpec) -> dict[str, Any]:
    """Return the counts of all tasks together: documents read, dropped, changed and left."""
    filtered: Counter[str] = Counter()
    cleaned: Counter[str] = Counter()
    for task in range(spec.tasks):
        filtered.update(read_counts(spec, "filtered", task))
        cleaned.update(read_counts(spec, "cleaned", task))
    left = cleaned.pop("documents")
    duplicates = filtered.pop("documents") - cleaned.pop("unique")
    return {**filtered, "duplicates": duplicates, **cleaned, "left": left}
