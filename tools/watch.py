#!/usr/bin/env python
"""Monitor a run, live or afterwards: `tools/watch.py RUN_DIR`, where RUN_DIR is its --save."""

import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from megatron.common.cli import run_tool, with_flag
from megatron.common.errors import CheckpointError, ConfigError, MegatronError
from megatron.config.parsing.flags import parse_sections
from megatron.config.tools.diagnostics import WatchConfig
from megatron.diagnostics.monitor.history import History, JournalReader
from megatron.diagnostics.monitor.html_page import ReportedRun, write_page
from megatron.diagnostics.monitor.summary import view
from megatron.training.process.failure import failures_of

_CLEAR = "\x1b[H\x1b[2J"


def main(argv: Sequence[str]) -> None:
    """Show the run named on the command line `argv`."""
    argv = with_flag(argv, "--run-dir", "the --save directory of a run")
    parsed = parse_sections(argv, {"watch": WatchConfig}, description=__doc__ or "").sections
    config: WatchConfig = parsed["watch"]
    if config.every <= 0:
        raise ConfigError(f"--every {config.every:g} must be more than 0 seconds")
    if config.compare and not config.html:
        raise ConfigError("--compare has an effect with --html FILE only: add it")
    directory = Path(config.run_dir)
    reader, history = open_run(directory)
    if config.html:
        runs = [ReportedRun(directory, history)]
        runs += [
            ReportedRun(Path(other), open_run(Path(other))[1]) for other in config.compare or ()
        ]
        write_page(Path(config.html), runs, datetime.now().astimezone())
        print(f"written to {config.html}")
        return
    show(history, directory)
    while not (config.once or history.end):
        time.sleep(config.every)
        records = [*new_records(reader, directory)]
        history.add(records)
        if records or sys.stdout.isatty():
            show(history, directory)


def open_run(directory: Path) -> tuple[JournalReader, History]:
    """Return the history of a run until now, and the reader of its later records."""
    reader, history = JournalReader(directory), History()
    history.add(new_records(reader, directory))
    if history.is_empty and not failures_of(directory):
        # Not a permanent error: the run may write its first step later.
        raise MegatronError(f"{directory}: the journal has no step yet")
    return reader, history


def new_records(reader: JournalReader, directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the next records of the journal; none if the run failed before it had one."""
    try:
        yield from reader.new_records()
    except CheckpointError:
        if not failures_of(directory):
            raise


def show(history: History, directory: Path) -> None:
    """Print the view of the run; on a terminal, clear the screen first."""
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else None
    text = view(history, directory, datetime.now().astimezone(), width=width)
    print(_CLEAR + text if is_terminal else text, flush=True)


if __name__ == "__main__":
    run_tool(main)
