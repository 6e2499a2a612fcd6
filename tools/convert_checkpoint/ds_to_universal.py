#!/usr/bin/env python
"""Convert a checkpoint to DeepSpeed's universal format: no layout, one folder for each parameter.

A run does not need this: --load reads checkpoints of any layout. It is for other programs, and for
--universal-checkpoint.
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
    """Run the tool with the command line `argv`."""
    parsed = parse_sections(
        argv, {"universal": UniversalConfig}, description=__doc__ or ""
    ).sections
    config: UniversalConfig = parsed["universal"]
    workers = max(config.num_extract_workers, config.num_merge_workers)
    if min(config.num_extract_workers, config.num_merge_workers) < 1:
        raise ConfigError("--num_extract_workers and --num_merge_workers must be at least 1")
    # Imported here, after flags are checked: torch takes seconds.
    from megatron.checkpointing.resharding.universal import write_universal

    write_universal(Path(config.input_folder), Path(config.output_folder), workers=workers)
    print(f"{config.output_folder} holds {config.input_folder} without its layout")


if __name__ == "__main__":
    run_tool(main)
