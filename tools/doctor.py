#!/usr/bin/env python
"""Check the machines of a run: a report for bugs, and a list of problems with remedies.

Give the flags of a run to see which kernels and tokenizer it would use. Under srun or a launcher
it checks all hosts, the network between them and their clocks. The exit code is 1 if a line begins
with PROBLEM.
"""

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.util import find_spec
from pathlib import Path
from signal import Signals

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from megatron.common.cli import run_tool
from megatron.common.errors import ConfigError
from megatron.config.config import all_sections, parse_config_for_checkpoint
from megatron.config.parsing.flags import switch_words
from megatron.config.parsing.near_misses import plain
from megatron.config.tools.diagnostics import DoctorConfig
from megatron.diagnostics.doctor.findings import Examined, as_json, problems_of, report_lines
from megatron.diagnostics.doctor.host import host_section
from megatron.diagnostics.doctor.versions import versions_section
from megatron.training.process.environment import (
    Launch,
    export_launch,
    rank_environments,
    read_launch,
)
from megatron.training.process.launchers import write_root_cause

EXAMPLE = "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --bf16"
"""Flags of the run whose kernels are reported by default."""

NOT_NEEDED = {"schedule": {"lr": 1e-4}, "training": {"micro_batch_size": 1, "train_iters": 1}}
"""Values for required flags of training, which have no effect here."""

_OF_NO_RUN = {"--device", "--local-rank"}
"""Flags of training that may be combined with the example."""


def main(argv: Sequence[str]) -> None:
    """Print the report; exit with 1 if there is a problem."""
    given = {plain(word.partition("=")[0]) for word in argv}
    is_example = given.isdisjoint(switch_words(all_sections()).keys() - _OF_NO_RUN)
    words = [*EXAMPLE.split(), *argv] if is_example else argv
    config, sections = parse_config_for_checkpoint(
        words, NOT_NEEDED, {"doctor": DoctorConfig}, description=__doc__ or ""
    )
    options: DoctorConfig = sections["doctor"]
    launch = read_launch(config.parallel.local_rank)
    if options.nproc < 1:
        raise ConfigError(f"--nproc {options.nproc} must be at least 1")
    if launch.world_size == 1 and options.nproc > 1:
        sys.exit(start_processes(options.nproc, argv))
    if options.nproc not in (1, launch.world_size):
        raise ConfigError(
            f"--nproc {options.nproc}, but a launcher has started {launch.world_size}: leave it out"
        )
    file = options.json if launch.rank == 0 else None  # other ranks may print too
    if find_spec("torch") is None:
        report(without_torch(launch), file)
    export_launch(launch, "cpu" if config.parallel.device == "cpu" else device_here())
    from megatron.diagnostics.doctor.examine import examine

    report(examine(config, options, launch, is_example=is_example), file)


def device_here() -> str:
    """Return the kind of device that a run would compute on."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def without_torch(launch: Launch) -> list[Examined]:
    """Return the findings of a host's first process where PyTorch is missing."""
    if launch.local_rank:
        return []
    sections = [versions_section(), host_section(processes=launch.world_size)]
    return [Examined(socket.gethostname(), sections)]


def report(examined: Sequence[Examined], file: str | None) -> None:
    """Print the report, write it to `file`, and exit."""
    if examined:
        print(*report_lines(examined), sep="\n", flush=True)
        if file:
            write(Path(file), json.dumps(as_json(examined), indent=2))
    sys.exit(1 if problems_of(examined) else 0)


def write(file: Path, text: str) -> None:
    """Write `text` to `file`.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {file}: {error.strerror}; give another file") from error


def start_processes(number: int, argv: Sequence[str]) -> int:
    """Run this program in `number` processes here; return 1 if any of them did not return 0.

    When one fails, the remaining processes are killed: they would wait for it.
    """
    words = [sys.executable, str(Path(__file__).resolve()), *argv]
    with rank_environments(number) as environments, ThreadPoolExecutor(number) as threads:
        processes = [subprocess.Popen(words, env=environment) for environment in environments]
        ranks = {threads.submit(process.wait): rank for rank, process in enumerate(processes)}
        try:
            codes = ((ended.result(), ranks[ended]) for ended in as_completed(ranks))
            code, rank = next((one for one in codes if one[0]), (0, 0))
        finally:
            for process in processes:
                process.kill()
    if code < 0:  # a killed process prints nothing
        print(f"error: rank {rank} was ended by {Signals(-code).name}", file=sys.stderr)
    return int(code != 0)


if __name__ == "__main__":
    run_tool(main, on_error=write_root_cause)
