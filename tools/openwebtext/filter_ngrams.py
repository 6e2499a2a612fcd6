#!/usr/bin/env python
"""Decontamination: take n-grams that evaluations share with training documents out of these."""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.common.cli import run_tool
from megatron.common.errors import DataError, raise_if_any
from megatron.common.process_pool import num_workers, ordered_map
from megatron.config.parsing.flags import parse_sections
from megatron.extensions.corpora.cleaning.evaluations import EVALUATIONS, evaluation_texts
from megatron.extensions.corpora.cleaning.ngrams import (
    CountNgrams,
    CutDocuments,
    CutRules,
    NgramSet,
    from_dictionary,
    to_dictionary,
)
from megatron.extensions.corpora.cleaning.records import (
    Line,
    batches,
    new_files,
    read_errors_name,
    read_lines,
    total_bytes,
)


@dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """Options of the decontamination."""

    dedup_dataset: list[str]
    """File of training documents, one JSON object a line, and the key of their text: FILE KEY."""

    tasks: list[str] = field(default_factory=list)
    """Evaluations to take out: lambada, squad, natural_questions, triviaqa, webqa, race, drop,
    coqa, piqa."""

    lambada_path: str | None = None
    """File of LAMBADA: one JSON object a line, text under the key text."""

    task_files: list[str] = field(default_factory=list)
    """Files of the other evaluations, each after its name: TASK FILE TASK FILE. One JSON object a
    line; without a file, the package `datasets` gets it."""

    output: str | None = None
    """File for the documents, and for the pieces of documents that were cut."""

    num_threads: int = 40
    """Processes at most; no more than there are cores."""

    max_ngram_size: int = CutRules.max_words
    """Words of an n-gram."""

    min_ngram_size: int = CutRules.min_words
    """Words that an evaluation's text must have to be looked for as a whole, if it has fewer than
    an n-gram."""

    filter_text_char_len: int = CutRules.min_chars
    """Pieces of fewer characters are dropped."""

    key_threshold: int = CutRules.key_threshold
    """N-grams that the training documents hold so many times are common phrases, and stay."""

    splits_count: int = CutRules.max_pieces
    """Documents that would fall into more pieces are dropped."""

    remove_char_each_side: int = CutRules.margin
    """Characters that go with an n-gram on each side, and then on to the end of a sentence."""

    save_dictionary: str | None = None
    """File for the n-grams to take out, as JSON."""

    load_dictionary: str | None = None
    """File that --save-dictionary wrote: nothing is counted, and --tasks is not needed."""


def main(argv: Sequence[str]) -> None:
    """Filter by the flags `argv`, then print the counts."""
    sections = parse_sections(argv, {"filter": FilterConfig}, description=__doc__).sections
    config: FilterConfig = sections["filter"]
    raise_if_any(problems(config))
    data_path, _ = config.dedup_dataset
    workers = num_workers(total_bytes([data_path]), config.num_threads)
    if config.load_dictionary is not None:
        ngrams, tasks = load(config.load_dictionary)
    else:
        ngrams, tasks = rare_ngrams(config, workers), config.tasks
    print(f"n-grams to take out: {len(ngrams)}")
    if config.save_dictionary is not None:
        kept = to_dictionary(ngrams, tasks=tasks, key_threshold=config.key_threshold)
        with new_files(config.save_dictionary, inputs=[data_path]) as (dictionary,):
            dictionary.write(json.dumps(kept, ensure_ascii=False, indent=0).encode())
    if config.output is not None:
        cut(config, ngrams, prefix="-".join(tasks), workers=workers)


def rare_ngrams(config: FilterConfig, workers: int) -> dict[str, int]:
    """Return the n-grams of the evaluations that are rare in the data, and how often they come."""
    files = dict(zip(config.task_files[::2], config.task_files[1::2], strict=True))
    if config.lambada_path is not None:
        files["lambada"] = config.lambada_path
    texts = (evaluation_texts(task, files.get(task)) for task in config.tasks)
    ngrams = rules_of(config).ngrams_of(chain.from_iterable(texts))
    data_path, key = config.dedup_dataset
    counts: Counter[str] = Counter()
    count = CountNgrams(NgramSet(ngrams), key)
    for found in ordered_map(count, batches(read_lines([data_path])), workers):
        counts += found
    return rules_of(config).rare(ngrams, counts)


def rules_of(config: FilterConfig) -> CutRules:
    """Return the rules that the flags set."""
    return CutRules(
        min_words=config.min_ngram_size,
        max_words=config.max_ngram_size,
        key_threshold=config.key_threshold,
        margin=config.remove_char_each_side,
        min_chars=config.filter_text_char_len,
        max_pieces=config.splits_count,
    )


def cut(config: FilterConfig, ngrams: Iterable[str], *, prefix: str, workers: int) -> None:
    """Write the documents, without the n-grams."""
    data_path, key = config.dedup_dataset
    function = CutDocuments(NgramSet(ngrams), key, prefix, rules_of(config))
    num_documents = num_cut = num_gone = num_shattered = 0
    with new_files(config.output or "", inputs=[data_path]) as (output,):
        for results in ordered_map(
            function, number_batches(batches(read_lines([data_path]))), workers
        ):
            for result in results:
                num_documents += 1
                num_cut += result.was_cut
                num_gone += not result.pieces
                num_shattered += result.had_too_many
                for piece in result.pieces:
                    output.write(piece)
    print(
        f"{config.output}: documents and pieces: {output.lines} | documents read: {num_documents} | "
        f"with n-grams: {num_cut} | dropped: {num_gone} | "
        f"of these for more than {config.splits_count} pieces: {num_shattered}"
    )


def number_batches(groups: Iterable[list[Line]]) -> Iterator[tuple[int, list[Line]]]:
    """Yield each batch with the number of its first document, counted from 0."""
    number = 0
    for batch in groups:
        yield number, batch
        number += len(batch)


def load(path: str) -> tuple[dict[str, int], list[str]]:
    """Return the n-grams and tasks of a saved dictionary."""
    with read_errors_name(path):
        raw = Path(path).read_bytes()
    loaded = from_dictionary(raw.decode("utf-8", "replace"))
    if loaded is None:
        raise DataError(f"--load-dictionary {path} is no file that --save-dictionary wrote")
    return loaded


def problems(config: FilterConfig) -> Iterator[str]:
    """Yield one sentence for each invalid option."""
    known = ", ".join(EVALUATIONS)
    if len(config.dedup_dataset) != 2:
        yield f"--dedup-dataset {' '.join(config.dedup_dataset)}: give a file and a key"
    if len(config.task_files) % 2:
        yield f"--task-files {' '.join(config.task_files)}: give a file after each task"
    for task in [*config.tasks, *config.task_files[::2]]:
        if task not in EVALUATIONS:
            yield f"{task}: no such task; choose from {known}"
    if not config.tasks and config.load_dictionary is None:
        yield f"no tasks: give --load-dictionary, or --tasks with some of {known}"
    if config.output is None and config.save_dictionary is None:
        yield "nothing to write: give --output or --save-dictionary"
    if not 1 <= config.min_ngram_size <= config.max_ngram_size:
        yield (
            f"--min-ngram-size {config.min_ngram_size}: give 1 to --max-ngram-size "
            f"{config.max_ngram_size}"
        )
    numbers = {
        "--num-threads": (config.num_threads, 1),
        "--key-threshold": (config.key_threshold, 1),
        "--filter-text-char-len": (config.filter_text_char_len, 0),
        "--splits-count": (config.splits_count, 0),
        "--remove-char-each-side": (config.remove_char_each_side, 0),
    }
    for flag, (number, least) in numbers.items():
        if number < least:
            yield f"{flag} {number}: give {least} or more"


if __name__ == "__main__":
    run_tool(main)
