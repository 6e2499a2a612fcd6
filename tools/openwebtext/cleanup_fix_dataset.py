#!/usr/bin/env python
"""Run chosen cleaning tasks over files of documents, and keep apart what they drop."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.common.cli import run_tool
from megatron.common.errors import raise_if_any
from megatron.common.process_pool import num_workers, ordered_map
from megatron.common.remote_files import is_url, join
from megatron.config.parsing.flags import parse_sections
from megatron.extensions.corpora.cleaning.records import batches, new_files, read_lines, total_bytes
from megatron.extensions.corpora.cleaning.repair import TASKS, RunTasks


@dataclass(frozen=True, kw_only=True)
class CleanupConfig:
    """Options of the cleaning."""

    input_files: list[str]
    """Files with one JSON object a line, text under the key text."""

    tasks: list[str]
    """What to do with each text, in this order, until one drops it: remove_512,
    remove_256_javascript, remove_512_non_english, ftfy_fix_text, general_cleaning."""

    output_path: str
    """Directory for NAME_cleaned.json and NAME_filtered.json of each input."""

    log_interval: int = 100
    """Documents between two lines of progress where there is no terminal for a bar."""


def main(argv: Sequence[str]) -> None:
    """Clean by the flags `argv`; print the dropped documents of each file."""
    sections = parse_sections(argv, {"cleanup": CleanupConfig}, description=__doc__).sections
    config: CleanupConfig = sections["cleanup"]
    raise_if_any(problems(config))
    workers = num_workers(total_bytes(config.input_files))
    for path in config.input_files:
        clean(path, config, workers)


def clean(path: str, config: CleanupConfig, workers: int) -> None:
    """Write both files of one input."""
    folder, stem = config.output_path, Path(path).stem
    stem = join(folder, stem) if is_url(folder) else str(Path(folder) / stem)
    names = (f"{stem}_cleaned.json", f"{stem}_filtered.json")
    counts: Counter[str] = Counter()
    with new_files(*names, inputs=config.input_files) as (cleaned, filtered):
        lines = read_lines([path], log_interval=config.log_interval)
        for outcomes in ordered_map(RunTasks(tuple(config.tasks)), batches(lines), workers):
            for outcome in outcomes:
                (cleaned if outcome.dropped_by is None else filtered).write(outcome.line)
                counts[outcome.dropped_by or ""] += 1
                if outcome.dropped_by is None:
                    counts.update(outcome.changed_by)
    by_task = " | ".join(f"{task}: {counts[task]}" for task in config.tasks)
    print(f"{names[0]}: documents: {cleaned.lines} | filtered: {filtered.lines} | {by_task}")


def problems(config: CleanupConfig) -> list[str]:
    """Return one sentence for each invalid option."""
    found = [
        f"--tasks {task}: no such task; choose from {', '.join(TASKS)}"
        for task in config.tasks
        if task not in TASKS
    ]
    stems = Counter(Path(path).stem for path in config.input_files)
    found += [
        f"--input-files: several are named {stem}, and their output would be the same file"
        for stem, count in stems.items()
        if count > 1
    ]
    if config.log_interval < 1:
        found.append(f"--log-interval {config.log_interval}: give 1 or more")
    if not (is_url(config.output_path) or Path(config.output_path).is_dir()):
        found.append(f"--output-path {config.output_path} is not a directory")
    return found


if __name__ == "__main__":
    run_tool(main)
