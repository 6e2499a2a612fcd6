#!/usr/bin/env python
"""Export the weights of a checkpoint to Megatron-LM files, for any number of ranks.

Rows of gated MLPs come gate first for SwiGLU, as in Megatron-LM, and last for other gates, as
BigScience does.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.checkpointing.manifest import read_manifest
from megatron.common.cli import run_tool
from megatron.config.parsing.flags import parse_sections
from megatron.config.tools.checkpoint_tools import MegatronConfig


def main(argv: Sequence[str]) -> None:
    """Run the tool with the command line `argv`."""
    parsed = parse_sections(argv, {"megatron": MegatronConfig}, description=__doc__ or "").sections
    config: MegatronConfig = parsed["megatron"]
    source = Path(config.input_folder)
    manifest = read_manifest(source)
    # Imported here, after flags are checked: torch takes seconds.
    from megatron.checkpointing.megatron_lm.megatron_files import write_megatron
    from megatron.checkpointing.resharding.universal import read_checkpoint

    folder = write_megatron(
        manifest,
        read_checkpoint(source, manifest, optimizer=False),
        Path(config.output_folder),
        tensor=config.target_tp,
        pipeline=config.target_pp,
        flags=("--target_tp", "--target_pp"),
        for_release=config.for_release,
    )
    print(f"{folder} holds the weights of {source}")


if __name__ == "__main__":
    run_tool(main)
