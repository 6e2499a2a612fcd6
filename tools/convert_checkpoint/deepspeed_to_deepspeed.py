#!/usr/bin/env python
"""Convert a checkpoint to another layout of tensor, pipeline and data-parallel ranks (resharding).

A run does not need this: --load reads checkpoints of any layout. This tool starts the ranks of the
new layout on the CPUs of this machine, which together hold the full training state.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.checkpointing.manifest import Manifest, read_manifest, tag_of
from megatron.common.cli import run_tool
from megatron.common.errors import CheckpointError, ConfigError
from megatron.config.config import parse_saved_config
from megatron.config.parsing.flags import parse_sections
from megatron.config.plugins import PluginModulesConfig
from megatron.config.tools.checkpoint_tools import LayoutConfig
from megatron.training.process.environment import has_rank, rank_environments

_LOOK_S = 0.1


def main(argv: Sequence[str]) -> None:
    """Start the ranks of the new layout."""
    config, manifest = read(argv)
    if (Path(config.output_folder) / tag_of(manifest.state.iteration)).exists():
        raise ConfigError(f"--output_folder {config.output_folder} holds this iteration already")
    parse_saved_config(argv, manifest.config)  # refused before any rank starts
    tensor, pipeline, data = layout(config, manifest)
    with rank_environments(tensor * pipeline * data) as environments:
        ranks = [
            subprocess.Popen([sys.executable, __file__, *argv], env=environment)
            for environment in environments
        ]
        try:
            # If one rank fails, the other ranks would wait for it forever: end them all.
            while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
                time.sleep(_LOOK_S)
        finally:
            for rank in ranks:
                rank.kill()
    if any(codes):
        raise CheckpointError(f"{config.output_folder} is not written: see above")


def run_as_rank(argv: Sequence[str]) -> None:
    """Run one rank."""
    from megatron.training.convert_layout import config_of_layout, save_in_layout
    from megatron.training.process.device import prepare_process

    config: LayoutConfig
    config, manifest = read(argv)
    saved = parse_saved_config(argv, manifest.config)
    tensor, pipeline, _ = layout(config, manifest)
    target = config_of_layout(
        saved, manifest, config.output_folder, tensor=tensor, pipeline=pipeline
    )
    launch, _ = prepare_process(target.parallel)
    save_in_layout(target, manifest, Path(config.input_folder), launch)


def read(argv: Sequence[str]) -> tuple[LayoutConfig, Manifest]:
    """Parse the flags and read the manifest of the checkpoint."""
    sections = {"layout": LayoutConfig, "plugins": PluginModulesConfig}
    parsed = parse_sections(argv, sections, description=__doc__ or "").sections
    config: LayoutConfig = parsed["layout"]
    return config, read_manifest(Path(config.input_folder))


def layout(config: LayoutConfig, manifest: Manifest) -> tuple[int, int, int]:
    """Return the sizes of the new layout: tensor, pipeline, data."""
    then = manifest.parallel
    sizes = (
        then.tensor if config.target_tp is None else config.target_tp,
        then.pipeline if config.target_pp is None else config.target_pp,
        then.data if config.target_dp is None else config.target_dp,
    )
    if min(sizes) < 1:
        raise ConfigError("--target_tp, --target_pp and --target_dp must be at least 1")
    return sizes


if __name__ == "__main__":
    if has_rank():
        from megatron.training.process.launch import run_rank

        run_rank(run_as_rank, sys.argv[1:])
    run_tool(main)
