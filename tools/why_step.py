#!/usr/bin/env python
"""Print the samples of a training step, and the step's metrics.

    python tools/why_step.py STEP --load DIR

DIR is the run's --save. For a step that was taken more than once, every attempt is printed, with
the samples that its flags select.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from megatron.checkpointing.saved_run import SavedRun, read_saved_run
from megatron.common.cli import run_tool
from megatron.common.errors import ConfigError, MegatronError
from megatron.common.installation import in_this_installation
from megatron.config.config import (
    all_sections,
    flatten,
    load_sections,
    parse_config_for_checkpoint,
)
from megatron.config.objectives import objective_tokenizer_arguments
from megatron.config.parsing.flags import HELP, options_of
from megatron.config.parsing.parser import peek
from megatron.config.plan.samples import plan_samples
from megatron.data.datasets.datasets import build_datasets, view_of
from megatron.data.sampling.provenance import lines_of_step
from megatron.tokenizer.build import build_tokenizer
from megatron.training.loop.journal import every_attempt, read_journal, starts_of
from megatron.training.prepare import with_local_data
from megatron.training.telemetry.step_records import STEP

_NEIGHBOURS = 20
_SHOWN = ("lm_loss", "grad_norm", "learning_rate", "loss_scale", "skipped", "seconds")


def main(argv: Sequence[str]) -> None:
    """Print samples and metrics of the step named in `argv`."""
    if HELP & {*argv}:
        print(in_this_installation(__doc__ or ""))
        return
    load = peek(argv).get("load")
    if not load or not argv[0].isdigit():
        wrong = f"{argv[0]} is not a step" if argv and load else "--load is missing"
        raise ConfigError(
            f"{wrong}: write tools/why_step.py STEP --load DIR, the --save of the run"
        )
    step, directory = int(argv[0]), Path(load)
    records = [r for r in every_attempt(directory, step) if r["event"] == STEP]
    if not records:
        raise ConfigError(f"step {step}: the journal in --load {load} has no record of it")
    load_sections(argv)  # with the flags of --plugin
    for line in metric_lines(records, list(read_journal(directory, warns=False))):
        print(line)
    for line in sample_lines(argv[1:], load, records):
        print(line)


def metric_lines(
    records: Sequence[dict[str, Any]], journal: Sequence[dict[str, Any]]
) -> Iterator[str]:
    """Yield the metrics of each attempt at a step, and the medians of the steps around it."""
    for record in records:
        known = {"run": "?", "attempt": "?", "host": "?", "at": "?"} | record
        yield (
            f"step {record['iteration']} of run {known['run']}, attempt {known['attempt']}, "
            f"on {known['host']} at {known['at']}"
        )
        values = (
            f"{name} {'NaN' if record[name] is None else record[name]}"
            for name in _SHOWN
            if name in record
        )
        yield "  " + " | ".join(values)
    step = records[-1]["iteration"]
    near = [
        r for r in journal if r["event"] == STEP and 0 < abs(r["iteration"] - step) <= _NEIGHBOURS
    ]
    for name in ("lm_loss", "grad_norm"):
        if values := [r[name] for r in near if r.get(name) is not None]:
            yield f"  median {name} of the {len(values)} steps around it: {median(values):.6g}"


def sample_lines(
    argv: Sequence[str], load: str, records: Sequence[dict[str, Any]]
) -> Iterator[str]:
    """Yield the samples of the step, once for all attempts with equal samples."""
    starts = {start.get("attempt"): start for start in starts_of(Path(load), warns=False)}
    newest = read_saved_run(load)
    runs = [run_of(starts.get(record.get("attempt"), {}), newest) for record in records]
    flags = {name: None for run in runs for name in flatten(run.config)}
    if unknown := flags.keys() - options_of(all_sections()).keys():
        yield f"  flags of another version, ignored: {', '.join(sorted(unknown))}"
    seen: dict[tuple[str, ...], dict[str, None]] = {}  # attempts by their lines, in order
    for record, run in zip(records, runs, strict=True):
        try:
            lines = tuple(samples_of_attempt(argv, run, record["first_sample"], record["samples"]))
        except MegatronError as error:
            if run == runs[-1]:
                raise
            lines = (f"  its samples cannot be read: {error}",)
        seen.setdefault(lines, {})[str(record.get("attempt"))] = None
    for lines, attempts in seen.items():
        if len(seen) > 1:
            yield f"samples of attempt {' and '.join(attempts)}:"
        yield from lines


def run_of(start: dict[str, Any], newest: SavedRun) -> SavedRun:
    """Return the flags of a start from the journal; without a record, the newest start's flags."""
    flags = start.get("flags")
    if not flags:
        return newest
    names = {flag: name for name, flag in options_of(all_sections()).items()}
    fields = {names.get(flag, flag): value for flag, value in flags.items()}
    devices = re.findall(r"(?:^|, )(\d+) x ", start.get("with", {}).get("devices", ""))
    world_size = sum(map(int, devices)) or newest.world_size
    return SavedRun({"flags": fields}, world_size, newest.objective)


def samples_of_attempt(argv: Sequence[str], run: SavedRun, first: int, last: int) -> Iterator[str]:
    """Yield source and text of the samples from `first` to before `last`."""
    config, _ = parse_config_for_checkpoint(argv, run.config, {}, description=__doc__ or "")
    config = with_local_data(config, run.objective)
    tokenizer = build_tokenizer(**objective_tokenizer_arguments(config.tokenizer, run.objective))
    resolved = plan_samples(config, world_size=run.world_size, objective=run.objective)
    seed = resolved.training.seed
    plan = replace(resolved.data, valid=(), test=())
    view = view_of(resolved.objective, resolved.masks, tokenizer, seed)
    sources = build_datasets(plan, seq_length=resolved.seq_length, seed=seed).train
    texts = build_datasets(plan, seq_length=resolved.seq_length, seed=seed, view=view).train
    yield from lines_of_step(
        first,
        last,
        sources=sources,
        texts=texts,
        tokenizer=tokenizer,
        batch=resolved.batch,
    )


if __name__ == "__main__":
    run_tool(main)
