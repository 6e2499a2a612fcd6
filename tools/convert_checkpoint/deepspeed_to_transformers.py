#!/usr/bin/env python
"""Export a checkpoint to Hugging Face transformers: to_hf.py with the flags of older scripts."""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.checkpointing.manifest import read_manifest
from megatron.checkpointing.publish import checkpoint_of
from megatron.common.cli import run_tool
from megatron.common.errors import ConfigError
from megatron.config.config import parse_saved_config
from megatron.config.objectives import objective_tokenizer_arguments
from megatron.config.parsing.flags import parse_sections
from megatron.config.plugins import PluginModulesConfig
from megatron.config.tools.hugging_face import TransformersConfig
from megatron.tokenizer.build import build_tokenizer


def main(argv: Sequence[str]) -> None:
    """Run the tool with the command line `argv`."""
    parsed = parse_sections(
        argv,
        {"transformers": TransformersConfig, "plugins": PluginModulesConfig},
        description=__doc__ or "",
    ).sections
    config: TransformersConfig = parsed["transformers"]
    for flag, ranks in (("--target_tp", config.target_tp), ("--target_pp", config.target_pp)):
        if ranks != 1:
            raise ConfigError(
                f"{flag} {ranks}: files of transformers are not divided over ranks; leave it out"
            )
    source = checkpoint_of(Path(config.input_folder))
    manifest = read_manifest(source)
    saved = parse_saved_config(argv, manifest.config)
    arguments = objective_tokenizer_arguments(saved.tokenizer, manifest.objective.name)
    tokenizer = build_tokenizer(**arguments)
    # Imported here, after flags are checked: torch takes seconds.
    from megatron.checkpointing.conversion.export import Export, ExportOptions, export

    output = Path(config.output_folder)
    job = Export(
        source=source,
        manifest=manifest,
        tokenizer=tokenizer,
        tokenizer_arguments=arguments,
        options=ExportOptions(for_release=config.for_release),
    )
    print(f"{output} holds {source} as {export(job, output)}")


if __name__ == "__main__":
    run_tool(main)
