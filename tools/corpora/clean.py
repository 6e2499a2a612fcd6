#!/usr/bin/env python
"""Clean a corpus and turn it into token files: filter, deduplicate, decontaminate, tokenize, join.

--input is JSON lines, plain or compressed, or Parquet; or a folder of a published data set, whose
training split is taken. Tasks run in processes of this machine, in
a SLURM array or on Ray. A run that was stopped continues with the same command.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.common import logging as log
from megatron.common.atomic_files import replace_text
from megatron.common.cli import run_tool
from megatron.common.errors import ConfigError, DataError, raise_if_any
from megatron.common.remote_files import state_of_input
from megatron.config.tools.preprocess import PreprocessConfig
from megatron.data.preprocessing.command import parse_flags, to_command
from megatron.data.preprocessing.preprocess_spec import PreprocessSpec
from megatron.data.preprocessing.recipe import corpus_report_of
from megatron.data.readers.inputs import STDIN
from megatron.data.token_files.publish import write_errors_name
from megatron.extensions.corpora.cleaning.evaluations import EVALUATIONS
from megatron.extensions.corpora.cleaning.filters import filter_factories, filter_problems
from megatron.extensions.corpora.corpus.executors import Executor
from megatron.extensions.corpora.corpus.spec import CorpusSpec
from megatron.extensions.corpora.corpus.steps import corpus_steps, make_folders
from megatron.extensions.corpora.flags import CleaningConfig
from megatron.extensions.corpora.published import training_files

_OF_TOKENS = (
    *("append_eod", "append_bos", "prepend_space", "empty_documents"),
    *("split_sentences", "lang", "keep_newlines"),
)
"""Fields of `PreprocessSpec` that the tokens depend on."""


def main(argv: Sequence[str]) -> None:
    """Clean by the flags `argv`, then print the counts."""
    log.configure(rank=0)
    parsed = parse_flags(argv, description=__doc__ or "", extra={"cleaning": CleaningConfig})
    files: PreprocessConfig = parsed.sections["preprocess"]
    files = replace(files, input=training_files(files.input))
    command = to_command(replace(parsed, sections={**parsed.sections, "preprocess": files}))
    config: CleaningConfig = command.sections["cleaning"]
    tokens = command.spec
    names = [] if config.filters == ["none"] else config.filters
    raise_if_any([*problems(config, tokens, command.output_url), *filter_problems(names)])
    spec = CorpusSpec(
        inputs=tokens.inputs,
        folder=Path(f"{tokens.output_prefix}.cleaning").resolve(),
        tasks=config.tasks or tokens.workers,
        filters=filter_factories(names),
        similarity=config.similarity if config.similarity < 1 else None,
        bands=config.num_bands,
        num_seeds=config.num_seeds,
        evaluations=tuple(zip(config.evaluations[::2], config.evaluations[1::2], strict=True)),
    )
    require_same_options(spec, names, tokens)
    make_folders(spec)
    executor = Executor(
        name=config.executor,
        folder=spec.folder,
        workers=tokens.workers,
        slurm=dict(option.split("=", 1) for option in config.slurm),
        path=str(Path(__file__).resolve().parents[2]),
    )
    report_path = corpus_report_of(tokens.output_prefix)
    steps = corpus_steps(spec, tokens)
    written = [prefix + end for prefix in tokens.prefixes for end in (".bin", ".idx")]
    was_finished = not executor.unfinished_tasks(steps[-1])
    if was_finished and not all(map(os.path.exists, [*written, report_path])):
        executor.forget_finished(steps[-2:])
    if executor.unfinished_tasks(steps[-1]):
        for notice in command.notices:
            print(notice)
    if not executor.run(steps):
        print(f"submitted; {report_path} will have the counts")
        return
    report = json.loads(Path(report_path).read_text(encoding="utf-8"))
    print(" | ".join(f"{name}: {count}" for name, count in report["documents"].items()))


def _state_of(path: str) -> int | str:
    try:
        return state_of_input(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def require_same_options(spec: CorpusSpec, filters: Sequence[str], tokens: PreprocessSpec) -> None:
    """Check that the folder has work of the same options and inputs; begin it if it has none.

    Raises:
        ConfigError: it has others.
    """
    options = {
        "input": spec.input_states(),
        "tasks": spec.tasks,
        "filters": [*filters],
        "similarity": spec.similarity,
        "num-bands": spec.bands,
        "num-seeds": spec.num_seeds,
        "evaluations": [[name, path, _state_of(path)] for name, path in spec.evaluations],
        "tokenizer": dict(tokens.tokenizer),
        "where": [tokens.where.key, *tokens.where.values] if tokens.where else None,
        **{name.replace("_", "-"): getattr(tokens, name) for name in _OF_TOKENS},
    }
    options = json.loads(json.dumps(options))
    path = spec.folder / "options.json"
    if not path.exists():
        with write_errors_name(spec.folder):
            spec.folder.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(options), is_flushed=True)
    before = json.loads(path.read_text(encoding="utf-8"))
    if differ := [name for name in options if options[name] != before.get(name)]:
        raise ConfigError(
            f"{spec.folder} was begun with other options: "
            + ", ".join(f"--{name} was {before.get(name)}, now {options[name]}" for name in differ)
            + "; give the earlier ones to continue it, or remove the folder"
        )


def problems(config: CleaningConfig, tokens: PreprocessSpec, output_url: str) -> Iterator[str]:
    """Yield one sentence for each invalid option."""
    if tokens.json_keys != ("text",) or tokens.text is not None:
        yield "documents must have their text under the key text: leave --json-keys out"
    if output_url:
        yield (
            f"--output-prefix {output_url}: the tasks write to a folder that all their machines "
            "share; give one, and copy the files to the URL afterwards"
        )
    if STDIN in tokens.inputs:
        yield "--input -: tasks read parts of files; give files"
    if not 0 < config.similarity <= 1:
        yield f"--similarity {config.similarity}: give a number above 0, at most 1"
    if min(config.num_bands, config.num_seeds) < 1 or config.num_seeds % config.num_bands:
        yield f"--num-seeds {config.num_seeds} is not a multiple of --num-bands {config.num_bands}"
    if config.tasks is not None and not 1 <= config.tasks <= 1 << 16:
        yield f"--tasks {config.tasks}: give 1 to {1 << 16}"
    if len(config.evaluations) % 2:
        yield f"--evaluations {' '.join(config.evaluations)}: give a file after each name"
    for name in config.evaluations[::2]:
        if name not in EVALUATIONS:
            yield f"--evaluations {name}: choose from {', '.join(EVALUATIONS)}"
    names = [option.partition("=")[0] for option in config.slurm]
    if any("=" not in option for option in config.slurm):
        yield f"--slurm {' '.join(config.slurm)}: give NAME=VALUE, such as time=24:00:00"
    if config.executor == "slurm" and not {"time", "partition"} <= set(names):
        yield "--executor slurm needs --slurm time=LIMIT partition=NAME"
    if config.executor != "slurm" and names:
        yield f"--slurm is for --executor slurm, and not for {config.executor}"


if __name__ == "__main__":
    run_tool(main)
