#!/usr/bin/env python
"""Turn texts into token files with several machines that share a file system.

Under a launcher such as torchrun or srun each rank converts its shard, and rank 0 joins them. As
a SLURM array each task has --num-shards and --shard-index, and a last one --merge-shards. The
files equal tools/preprocess_data.py's.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from megatron.common import logging as log
from megatron.common.cli import run_tool
from megatron.common.errors import ConfigError
from megatron.config.parsing.flags import Legacy
from megatron.config.tools.preprocess import ShardConfig
from megatron.data.preprocessing.command import read_flags
from megatron.data.preprocessing.distributed import preprocess_on_ranks
from megatron.data.preprocessing.preprocess import convert_share, merge_shards
from megatron.training.process.environment import has_rank, read_launch
from megatron.training.process.launchers import write_root_cause

_WITHOUT_EFFECT = "no effect: the rendezvous uses files next to the output"
LEGACY = (
    Legacy("--torch-backend", _WITHOUT_EFFECT, takes=1),
    Legacy("--local_rank", _WITHOUT_EFFECT, takes=1),
    Legacy("--local-rank", _WITHOUT_EFFECT, takes=1),
    Legacy("--scratch", "no effect: work is staged next to the output", takes=1),
    Legacy("--split", "--input takes files, not the name of a dataset", takes=1, refused=True),
    Legacy("--count", "documents are not counted out; cut the files", takes=1, refused=True),
    Legacy("--shuffle", "documents keep their order; training shuffles them", refused=True),
    Legacy("--seed", "documents keep their order; training shuffles them", takes=1, refused=True),
)


def main(argv: Sequence[str]) -> None:
    """Convert the shards of one rank, or join all, by the flags `argv` and the launcher."""
    launch = read_launch(None)
    is_launched = launch.world_size > 1 or has_rank()
    rank = launch.rank
    log.configure(rank=rank)
    command = read_flags(argv, description=__doc__, extra={"shards": ShardConfig}, legacy=LEGACY)
    config: ShardConfig = command.sections["shards"]
    if rank == 0:
        for notice in command.notices:
            print(notice)
    problems = shard_problems(config, is_launched)
    if problems:
        raise ConfigError(*problems)
    spec = command.spec
    num_shards = config.num_shards or launch.world_size
    merge_workers = 1 if config.merge == "serial" else os.cpu_count() or 1
    if config.merge_shards:
        command.deliver(merge_shards(replace(spec, workers=merge_workers)))
    elif config.shard_index is not None:
        convert_share(spec, config.shard_index, num_shards)
        print(f"shard {config.shard_index} of {num_shards} is done; --merge-shards joins all")
    else:
        written = preprocess_on_ranks(
            spec, rank, num_shards, timeout_s=config.timeout_s, merge_workers=merge_workers
        )
        command.deliver(written)


def shard_problems(config: ShardConfig, is_launched: bool) -> list[str]:
    """Return one sentence for each thing that leaves open what this process shall do."""
    if is_launched:
        if config.num_shards or config.shard_index is not None or config.merge_shards:
            return [
                "--num-shards, --shard-index and --merge-shards are for SLURM arrays; under a "
                "launcher that starts several processes leave them out"
            ]
        return []
    if config.num_shards is None or config.num_shards < 1:
        return ["give --num-shards, 1 or more, or run this under torchrun, mpirun or srun"]
    if config.merge_shards == (config.shard_index is not None):
        return [f"give --shard-index 0 to {config.num_shards - 1}, or --merge-shards at the end"]
    if config.shard_index is not None and not 0 <= config.shard_index < config.num_shards:
        return [f"--shard-index {config.shard_index}: give 0 to {config.num_shards - 1}"]
    return []


if __name__ == "__main__":
    run_tool(main, on_error=write_root_cause)
