#!/usr/bin/env python
"""Write a checkpoint without its layout, one folder for each parameter, as DeepSpeed's universal ones.

A run in another layout needs no such step: --load reads checkpoints of any. This is for other
programs, and for --universal-checkpoint.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.common.cli import run_tool
from megatron.common.errors import ConfigError
from megatron.config.parsing.flags import parse_sections
from megatron.config.tools.checkpoint_tools import UniversalConfig


def main(argv: Sequence[str]) -> None:
    """Do what the command line `argv` asks for."""
    said = parse_sections(argv, {"universal": UniversalConfig}, description=__doc__ or "").sections
    config: UniversalConfig = said["universal"]
    workers = max(config.num_extract_workers, config.num_merge_workers)
    if min(config.num_extract_workers, config.num_merge_workers) < 1:
        raise ConfigError("--num_extract_workers and --num_merge_workers must be at least 1")
    # Not above: torch is slow to import, and a wrong flag should not wait for it.
    from megatron.checkpointing.resharding.universal import write_universal

    write_universal(Path(config.input_folder), Path(config.output_folder), workers=workers)
    print(f"{config.output_folder} holds {config.input_folder} without its layout")


if __name__ == "__main__":
    run_tool(main)
